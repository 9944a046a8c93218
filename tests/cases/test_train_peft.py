"""Class train-peft: gradients, checkpointing, LoRA."""

import copy
import warnings

import pytest
import torch
from fixtures import FAST, assert_generates_as, assert_same, count, draw_adapter, feed, greedy, lora, tokens, whole

from deepseek_accel import optimize, report, restore
from deepseek_accel.testing import relative_error, tiny_model


def step(model, ids, lr=0.0):
    """Loss and gradients by name of one training step; `lr` > 0 also takes a plain SGD step."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    if lr:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= lr * parameter.grad
    return loss.item(), gradients


def assert_same_gradients(actual, expected):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (actual[name] is None) == (gradient is None), (
            f"{name} has {'no' if gradient is not None else 'a'} gradient"
        )
        if gradient is not None:
            error = relative_error(actual[name], gradient)
            assert error <= 1e-4, f"{name}: {error:.3g}"


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("model_type", [*FAST, "deepseek_v32"])
def test_T01_every_gradient_is_the_unpatched_one(model_type, mode):
    """The fast path is used with grad on: gradients vanish while the loss still falls."""
    stock = tiny_model(model_type)
    model = optimize(copy.deepcopy(stock))
    stock.train(mode == "train"), model.train(mode == "train")
    ids = tokens(20, rows=2)
    expected_loss, expected = step(stock, ids)
    loss, gradients = step(model, ids)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_same_gradients(gradients, expected)
    if model_type != "deepseek_v32":  # its indexer has none, unpatched too
        assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients.values())
    assert report(model).counters and all("gradients" in key or "stock" in key for key in report(model).counters), (
        "a fast path without backward ran in training"
    )


@pytest.mark.parametrize("model_type", FAST)
def test_T01_eval_generate_train_loop(model_type):
    """A trainer callback that generates between steps leaves the model in inference state, or stale weights in use."""
    stock = tiny_model(model_type)
    model = optimize(copy.deepcopy(stock))
    ids, prompt = tokens(20, rows=2), tokens(9, seed=1)
    logits = []
    for turn in range(3):
        for m in (stock, model):
            m.eval()
            with torch.inference_mode():
                m.generate(prompt, max_new_tokens=3, do_sample=False)
            logits.append(feed(m, tokens(14, seed=1), 9))
            m.train()
        assert_same(logits[-1], logits[-2])
        expected_loss, expected = step(stock, ids, lr=0.1)
        loss, gradients = step(model, ids, lr=0.1)
        assert loss == pytest.approx(expected_loss, rel=1e-4), turn
        assert_same_gradients(gradients, expected)
    assert relative_error(logits[-1], logits[1]) > 0.01, "the steps must change what is generated"
    restore(model)
    assert_same_gradients(step(model, ids)[1], step(stock, ids)[1])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
def test_T01_gradient_checkpointing(model_type, reentrant):
    """Recomputed layers take the fast path, because the first pass of a reentrant checkpoint runs without grad."""
    stock = tiny_model(model_type)
    model = optimize(copy.deepcopy(stock))
    plain = copy.deepcopy(stock)
    ids = tokens(20, rows=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for m in (stock, model):
            m.train()
            m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            m.enable_input_require_grads()
        (expected_loss, expected), (loss, gradients) = step(stock, ids), step(model, ids)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_same_gradients(gradients, expected)
    assert_same_gradients(gradients, step(plain, ids)[1])


@pytest.mark.parametrize("model_type", FAST)
def test_T01_dropout_is_active_in_training_only(model_type):
    """Attention dropout is lost in training, or stays on in eval."""
    stock = tiny_model(model_type, attention_dropout=0.5)
    model = optimize(copy.deepcopy(stock))
    ids = tokens(20)
    losses = []
    for m in (stock, model):
        m.train()
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                torch.manual_seed(0)
                losses.append(m(ids, labels=ids).loss.item())
        assert m(ids, labels=ids).loss.item() != losses[-1], "another draw"
        m.eval()
        losses.append(step(m, ids)[0])
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-5)
    assert abs(losses[0] - losses[2]) > 1e-3
    assert_same(whole(model, ids), whole(stock, ids))
    assert_same(feed(model, ids, 9), whole(stock, ids))


@pytest.mark.parametrize("trained", ["inputs", "one norm", "kv_b_proj", "experts", "gate"])
def test_T01_parts_frozen(trained):
    """With most parameters frozen, a check for gradients that looks at one tensor misses where they come from."""
    results = []
    stock = tiny_model("deepseek_v3")
    for m in (stock, optimize(copy.deepcopy(stock))):
        m.requires_grad_(False)
        embeddings = m.get_input_embeddings()(tokens(12)).detach()
        layer = m.model.layers[1]
        parts = {
            "inputs": [embeddings],
            "one norm": [layer.self_attn.kv_a_layernorm.weight],
            "kv_b_proj": [layer.self_attn.kv_b_proj.weight],
            "experts": [layer.mlp.experts.down_proj],
            "gate": [layer.mlp.gate.weight],
        }[trained]
        for part in parts:
            part.requires_grad_()
        m(inputs_embeds=embeddings, labels=tokens(12)).loss.backward()
        results.append(parts[0].grad)
    assert results[0].abs().max() > 0
    assert_same(results[1], results[0])


@pytest.mark.parametrize("model_type", FAST)
def test_T01_lora_training(model_type):
    """Gradients to LoRA matrices vanish, because the projection they wrap is bypassed."""
    pytest.importorskip("peft")
    targets = {"deepseek_v2": ["q_proj", "kv_b_proj", "o_proj"], "deepseek_v3": ["q_b_proj", "kv_b_proj", "o_proj"]}
    base = tiny_model(model_type)
    stock = lora(copy.deepcopy(base), targets.get(model_type, ["q_proj", "v_proj", "o_proj"]))
    model = optimize(copy.deepcopy(stock))
    stock.train(), model.train()
    ids = tokens(20, rows=2)
    for _ in range(2):
        expected_loss, expected = step(stock, ids, lr=0.1)
        loss, gradients = step(model, ids, lr=0.1)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert len(expected) == 3 * 3 * 2 and all(g.abs().max() > 0 for g in expected.values())
        assert_same_gradients(gradients, expected)
    stock.eval(), model.eval()
    assert_generates_as(model, stock, ids[:1])


TARGETS = {
    "deepseek": ["q_proj", "o_proj", "gate_proj", "up_proj"],
    "deepseek_v2": ["q_proj", "o_proj", "gate_proj", "up_proj"],
    "deepseek_v3": ["q_b_proj", "o_proj", "gate_proj", "up_proj"],
    "llama": ["q_proj", "o_proj", "gate_proj", "up_proj"],
    "qwen2": ["q_proj", "o_proj", "gate_proj", "up_proj"],
}


@pytest.mark.parametrize("order", ["optimize first", "wrap first"])
@pytest.mark.parametrize("model_type", FAST)
def test_T03_adapters_of_an_optimized_peft_model(model_type, order):
    """PeftModel is not a PreTrainedModel: the optimizer finds nothing and says nothing."""
    pytest.importorskip("peft")
    base = tiny_model(model_type)
    stock = lora(copy.deepcopy(base), TARGETS[model_type])
    if order == "optimize first":
        model = lora(optimize(copy.deepcopy(base)), TARGETS[model_type])
    else:
        model = optimize(lora(copy.deepcopy(base), TARGETS[model_type]))
    assert optimize(model) is model and report(model).optimized
    ids = tokens(20)
    plain = feed(base, ids, 9)
    seen = [plain]

    def check(m=model, s=stock):
        ran = count(m, "attention:"), count(m, "layers: fused norm")
        expected = feed(s, ids, 9)
        assert_same(feed(m, ids, 9), expected)
        assert count(m, "attention:") > ran[0] and count(m, "layers: fused norm") > ran[1]
        return expected

    seen.append(check())
    assert_generates_as(model, stock, ids[:, :9], 3)
    assert count(model, "kv_cache: paged generate calls") == 1
    for m in (stock, model):
        lora(m, TARGETS[model_type], seed=1, name="second")
        m.set_adapter("second")
    seen.append(check())
    if model_type in ("llama", "qwen2"):  # PEFT cannot mix adapters of 3-D experts
        for m in (stock, model):
            m.add_weighted_adapter(["default", "second"], [0.7, 0.3], "mixed", combination_type="linear")
            m.set_adapter("mixed")
        seen.append(check())
    with stock.disable_adapter(), model.disable_adapter():
        assert_same(check(), plain, 1e-5)
    for m in (stock, model):
        m.set_adapter("default")
    assert_same(check(), seen[1], 1e-6)
    for i, first in enumerate(seen):
        for second in seen[i + 1 :]:
            assert relative_error(first, second) > 0.05, "the adapters must differ visibly"
    for m in (stock, model):
        m.merge_adapter()
    check()
    for m in (stock, model):
        m.unmerge_adapter()
    check()

    merged, unloaded = copy.deepcopy(model), copy.deepcopy(model)
    expected = seen[1]
    merged = merged.merge_and_unload()
    assert_same(feed(merged, ids, 9), expected)
    assert_same(check(merged, copy.deepcopy(stock).merge_and_unload()), expected)
    assert_same(feed(restore(merged), ids, 9), expected)
    unloaded = unloaded.unload()
    assert_same(check(unloaded, base), plain)
    assert_same(feed(restore(unloaded), ids, 9), plain, 1e-5)
    restore(model)
    assert_same(feed(model, ids, 9), expected, 1e-5)
    assert not report(model).optimized


@pytest.mark.parametrize("order", ["optimize first", "wrap first"])
@pytest.mark.parametrize("part", ["modules_to_save", "target_parameters"])
def test_T03_adapters_on_the_modules_the_passes_change(part, order):
    """PEFT copies a patched norm or wraps the experts; the patch then calls the original's weights, or is lost."""
    pytest.importorskip("peft")
    base = tiny_model("deepseek_v3")
    options = {
        "modules_to_save": dict(targets=["o_proj"], modules_to_save=["kv_a_layernorm", "lm_head"]),
        "target_parameters": dict(
            targets=["o_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        ),
    }[part]

    def wrap(m):
        m = lora(m, **options)
        draw_adapter(m, 0)
        with torch.no_grad():
            for name, parameter in m.named_parameters():
                if "modules_to_save" in name:
                    parameter.mul_(1.5)
        return m

    stock = wrap(copy.deepcopy(base))
    model = wrap(optimize(copy.deepcopy(base))) if order == "optimize first" else optimize(wrap(copy.deepcopy(base)))
    ids = tokens(20)
    expected, plain = feed(stock, ids, 9), feed(base, ids, 9)
    assert relative_error(expected, plain) > 0.05
    assert_same(feed(model, ids, 9), expected)
    with model.disable_adapter():
        assert_same(feed(model, ids, 9), plain)
    stock.train(), model.train()
    (loss, gradients), (expected_loss, expected_gradients) = step(model, ids), step(stock, ids)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_same_gradients(gradients, expected_gradients)


def test_T03_prompt_learning():
    """Prompt tuning gives embeddings and a longer mask to the base model; the fast path must take both."""
    peft = pytest.importorskip("peft")
    for model_type in ("deepseek_v3", "llama"):
        base = tiny_model(model_type)
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            stock = peft.get_peft_model(copy.deepcopy(base), config).eval()
        model = optimize(copy.deepcopy(stock))
        ids = tokens(20)
        with torch.no_grad():
            expected = stock(input_ids=ids).logits
            assert_same(model(input_ids=ids).logits, expected)
        _, gradients = step(model, ids)
        assert_same_gradients(gradients, step(stock, ids)[1])
        assert all(g.abs().max() > 0 for g in gradients.values())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
            assert torch.equal(ours, stock.generate(input_ids=ids, max_new_tokens=4, do_sample=False))
        greedy(base, ids, 1)
