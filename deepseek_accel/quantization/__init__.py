"""4-bit weights: how they are chosen (AWQ, arXiv 2306.00978) and how checkpoints hold them.

A quantised weight is `(code - zero) * scale`: codes uint8 0..15 [..., N, K] (N out, K in features; experts lead with
E), scales [..., N, G] in the model's dtype, zeros uint8 [..., N, G]; G = ceil(K / group_size), the last group may be
short.

What a pass or a writer needs of a calibration, with NAME the qualified name of a parameter, such as
"model.layers.0.mlp.down_proj.weight" or "model.layers.1.mlp.experts.gate_up_proj":

    calibration.check(model)               CheckpointError if it was made for another model
    calibration.group_size                 what it was made for
    calibration.names                      frozenset of NAMEs it was made for; others are rounded to nearest
    calibration.quantize(NAME, weight)     -> codes, scales, zeros of one weight of the original model
    calibration.rescaled_names             NAMEs that must change if they stay in 16 bits: norms, routers, and what a
                                           pass leaves out
    calibration.rescaled(NAME, tensor)     -> the new tensor, same shape and dtype; the same object for any other NAME

AWQ scales the columns of a weight and divides its input by the same numbers. Here they are powers of two and are folded
into what makes the input: into the norm before gate and up rows (the router's columns get them back), and into the up
rows before a down projection. So nothing is left to compute at run time, and the router's logits keep their bits.
"""
