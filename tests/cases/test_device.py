"""Class device: accelerate's hooks, torch's hooks, offloading. Several GPUs: tests/gpu/test_devices.py."""

import copy
import itertools

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from fixtures import FAST, MLA, assert_generates_as, assert_same, count, feed, feed_once, greedy, tokens

from deepseek_accel import optimize, report, restore
from deepseek_accel.cache import paged_cache
from deepseek_accel.testing import relative_error, tiny_model

IDS = tokens(14)
CALLS = 1 + 5  # of `feed(model, IDS, 9)`


class Recorder(ModelHook):
    """Counts, and changes the output, so that a lost hook shows in the numbers too."""

    def __init__(self, factor=1.0):
        self.before, self.after, self.factor = 0, 0, factor

    def pre_forward(self, module, *args, **kwargs):
        self.before += 1
        return args, kwargs

    def post_forward(self, module, output):
        self.after += 1
        if self.factor == 1.0:
            return output
        return output * self.factor if isinstance(output, torch.Tensor) else (output[0] * self.factor, *output[1:])


PARTS = {
    "layer": lambda m: m.model.layers[1],
    "attention": lambda m: m.model.layers[1].self_attn,
    "mlp": lambda m: m.model.layers[1].mlp,
    "norm": lambda m: m.model.layers[1].input_layernorm,
    "experts": lambda m: m.model.layers[1].mlp.experts,
    "kv_b_proj": lambda m: m.model.layers[1].self_attn.kv_b_proj,
    "model": lambda m: m.model,
}
ORDERS = [
    order
    for order in itertools.permutations(("add", "optimize", "remove", "restore"))
    if order.index("add") < order.index("remove") and order.index("optimize") < order.index("restore")
]


def check(model, hooks, stock, stock_hooks, optimized):
    """Same output as the unpatched model with the same hooks, each run once a call, and the fast path if it is on."""
    norms = sum(type(m).__name__.endswith("RMSNorm") for m in model.modules())
    expected = feed(stock, IDS, 9)
    for cache in (None, paged_cache(model)):
        before = [(hook.before, hook.after) for hook in hooks]
        ran, steps = count(model, "layers: fused norm"), count(model, "layers: fused step")
        assert_same(feed_once(model, IDS, 9, cache), expected)
        for hook, (pre, post), theirs in zip(hooks, before, stock_hooks, strict=True):
            assert (hook.before - pre, hook.after - post) == (CALLS, CALLS)
            assert theirs.before > 0
        ran, steps = count(model, "layers: fused norm") - ran, count(model, "layers: fused step") - steps
        assert ran + (norms - 1) // 3 * steps == (norms * CALLS if optimized else 0)
    assert report(model).optimized == optimized


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
def test_V03_accelerate_hooks_in_every_order(model_type, order):
    """accelerate keeps _old_forward and installs a partial; patching or unpatching around it loses one of the two."""
    stock, model = tiny_model(model_type), tiny_model(model_type)
    parts = [
        part for name, part in PARTS.items() if model_type == "deepseek_v3" or name not in ("experts", "kv_b_proj")
    ]
    hooks, stock_hooks, optimized = [], [], False
    for action in order:
        if action == "add":
            hooks, stock_hooks = ([Recorder(1.5) for _ in parts[:-1]] + [Recorder()] for _ in range(2))
            for m, each in ((model, hooks), (stock, stock_hooks)):
                for part, hook in zip(parts, each, strict=True):
                    add_hook_to_module(part(m), hook)
        elif action == "remove":
            remove_hook_from_submodules(model), remove_hook_from_submodules(stock)
            hooks, stock_hooks = [], []
        elif action == "optimize":
            optimize(model)
            optimized = True
        else:
            restore(model)
            optimized = False
        check(model, hooks, stock, stock_hooks, optimized)
    left = {name for name, m in model.named_modules() if "_old_forward" in vars(m) or "_hf_hook" in vars(m)}
    assert not left
    optimize(model)
    check(model, [], stock, [], True)
    check(restore(model), [], stock, [], False)


@pytest.mark.parametrize("second", ["append", "replace"])
def test_V03_a_second_hook(second):
    """A hook chained to, or put in place of, another one finds the hook's partial instead of the patch."""
    stock, model = tiny_model("deepseek_v3"), tiny_model("deepseek_v3")
    for m in (stock, model):
        m.first, m.second = Recorder(1.5), Recorder(0.7)
        part = m.model.layers[1].input_layernorm
        add_hook_to_module(part, m.first)
        optimize(model)
        add_hook_to_module(part, m.second, append=second == "append")
    check(model, [model.second], stock, [stock.second], True)
    assert model.first.after == (2 * CALLS if second == "append" else 0)
    check(restore(model), [model.second], stock, [stock.second], False)
    optimize(model)
    for m in (stock, model):
        remove_hook_from_module(m, recurse=True)
    check(model, [], stock, [], True)
    check(restore(model), [], stock, [], False)


@pytest.mark.parametrize("hooked_first", [True, False])
@pytest.mark.parametrize("model_type", FAST)
def test_V03_torch_hooks(model_type, hooked_first):
    """forward hooks and pre-hooks on attention, MLP, norms or projections are not called, or called twice."""
    stock, model = tiny_model(model_type), tiny_model(model_type)
    seen = {id(stock): [], id(model): []}
    if not hooked_first:
        optimize(model)
    handles = []
    for m in (stock, model):
        for name, module in m.named_modules():
            if name and not name.endswith("experts.act_fn"):  # a test of its own below
                log = seen[id(m)]
                handles += [
                    module.register_forward_pre_hook(lambda _m, a, n=name, s=log: s.append(("pre", n))),
                    module.register_forward_hook(
                        lambda _m, a, out, n=name, s=log: (
                            s.append(("post", n)),
                            out * 1.1 if n.endswith(("layernorm", "down_proj", "o_proj", "kv_b_proj")) else None,
                        )[1]
                    ),
                ]
    if hooked_first:
        optimize(model)
    for patched in (True, False):
        assert_same(feed_once(model, IDS, 9, paged_cache(model)), feed(stock, IDS, 9))
        assert seen[id(model)] == seen[id(stock)], "other hooks ran, or in another order"
        assert len(set(seen[id(model)])) * CALLS == len(seen[id(model)])
        assert_same(greedy(model, IDS)[1], greedy(stock, IDS)[1])
        if patched:
            restore(model)
            for log in seen.values():
                log.clear()
    optimize(model)
    for handle in handles:
        handle.remove()
    plain = tiny_model(model_type)
    assert_same(feed(model, IDS, 9), feed(plain, IDS, 9))
    if model_type in MLA:
        assert count(model, "attention: absorbed") > 0


def test_V03_torch_hook_on_the_activation_of_the_experts():
    """A hook on experts.act_fn is not called, because the fused experts compute SiLU themselves."""
    stock, model = tiny_model("deepseek_v3"), optimize(tiny_model("deepseek_v3"))
    plain = feed(stock, IDS, 9)
    calls = []
    for m in (stock, model):
        m.model.layers[1].mlp.experts.act_fn.register_forward_hook(lambda _m, _a, out: (calls.append(1), out * 2)[1])
    expected = feed(stock, IDS, 9)
    assert calls and relative_error(expected, plain) > 0.01
    calls.clear()
    assert_same(feed(model, IDS, 9), expected)
    assert calls


def test_V03_global_torch_hooks():
    """A hook on every module (activation capture and editing) misses kv_b_proj, because absorption goes round it."""
    stock, model = tiny_model("deepseek_v3"), optimize(tiny_model("deepseek_v3"))
    plain = feed(stock, IDS, 9)
    projections = {m.model.layers[1].self_attn.kv_b_proj for m in (stock, model)}
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _args, out: out * 2 if module in projections else None
    )
    try:
        expected, actual = feed(stock, IDS, 9), feed(model, IDS, 9)
    finally:
        handle.remove()
    assert relative_error(expected, plain) > 0.1
    assert_same(actual, expected)


def offload(how, model, directory):
    if how == "cpu":
        return cpu_offload(model, execution_device=torch.device("cpu"))
    if how == "disk":
        return disk_offload(model, str(directory), execution_device=torch.device("cpu"))
    if how == "map to one device":
        return dispatch_model(model, {"": "cpu"}, force_hooks=True)
    layers = {f"model.layers.{i}": "cpu" for i in range(3)}
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"} | layers
    if how == "map by layer":
        return dispatch_model(model, places, main_device="cpu", force_hooks=True)
    places |= {"model.layers.1": "disk", "lm_head": "disk"}
    return dispatch_model(model, places, main_device="cpu", offload_dir=str(directory), force_hooks=True)


@pytest.mark.parametrize("optimized_first", [True, False])
@pytest.mark.parametrize("how", ["cpu", "disk", "map to one device", "map by layer", "map with disk"])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
def test_V03_offloaded_models(model_type, how, optimized_first, tmp_path):
    """A patch holds the weights of a moment, or bypasses the hook that loads them: meta tensors, or stale numbers."""
    stock = tiny_model(model_type)
    expected = greedy(stock, IDS)
    model = tiny_model(model_type)
    if optimized_first:
        optimize(model)
    offload(how, model, tmp_path)
    if not optimized_first:
        assert_same(greedy(model, IDS)[1], expected[1])
        optimize(model)
    offloaded = {n for n, p in model.named_parameters() if p.device.type == "meta"}
    assert bool(offloaded) == (how in ("cpu", "disk", "map with disk"))
    assert_same(greedy(model, IDS)[1], expected[1])
    assert_same(feed(model, IDS, 9), feed(stock, IDS, 9))
    assert {n for n, p in model.named_parameters() if p.device.type == "meta"} == offloaded
    assert report(model).warnings() == []
    restore(model)
    assert not report(model).optimized
    assert_same(greedy(model, IDS)[1], expected[1])
    optimize(model)
    if how == "cpu":  # accelerate cannot bring back what it put on the disk
        remove_hook_from_submodules(model)
        assert all(p.device.type == "cpu" for p in model.parameters())
        assert_generates_as(model, stock, IDS)
        assert_generates_as(restore(model), stock, IDS)
    assert copy.deepcopy(restore(model).config).to_dict() == stock.config.to_dict()


@pytest.mark.parametrize("optimized_first", [True, False])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
def test_V01_hooks_that_only_place_inputs(model_type, optimized_first):
    """A device_map over several GPUs hooks every module; taken for watchers, nothing of such a model would be fused."""
    stock, model = tiny_model(model_type), tiny_model(model_type)
    if optimized_first:
        optimize(model)
    for module in model.modules():
        if module is not model:
            add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    add_hook_to_module(model, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    optimize(model)
    assert_generates_as(model, stock, IDS)
    counters = report(model).counters
    if model_type == "deepseek_v3":  # a CPU gathers keys of grouped-query attention
        assert counters["layers: fused step"] > 0 and counters["attention: absorbed"] > 0
    assert not [name for name in counters if "hooked" in name and "stock loop" not in name], counters
    remove_hook_from_submodules(restore(model))
    assert_generates_as(model, stock, IDS)
