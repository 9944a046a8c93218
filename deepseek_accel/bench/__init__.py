"""Side-by-side measuring. Accuracy is checked before anything is timed, and a wrong result is not timed.

generate: whole models, stock against optimized, through `model.generate`. ops: single kernels against their
references. demo: the bundled model. Tables, JSON and pictures are in `tables`, what is measured in `shapes` and
`op_cases`.
"""
