"""Which ops torch makes of other calls on a GPU than on the CPU, and how they are captured."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dcpc
from dcpc.api import plan
from dcpc.codegen import Library
from dcpc.fx.gpu_ops import ONE_KERNEL, as_on_gpu
from dcpc.symbolic_profile import find
from dcpc.verify.exactness import gradient_errors
from dcpc.verify.reference import plain
from models.gpt import GPT, GPTConfig

aten = torch.ops.aten
TEXT = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
HALF = torch.bfloat16

# Composite ops with a derivative of their own and no CPU kernel, that no GPU of NVIDIA's has a
# kernel for either: they are whole on nested tensors, or on other makers' devices.
OF_OTHER_DEVICES = {
    "aten::chunk", "aten::linear", "aten::matmul", "aten::matmul.out", "aten::max_pool2d",
    "aten::narrow", "aten::value_selecting_reduction_backward",
}  # fmt: skip


def registered(name, key):
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def whole_somewhere():
    """Yields composite ops that a device with a kernel of its own differentiates as one call."""
    for schema in torch._C._jit_get_all_schemas():
        name = f"{schema.name}.{schema.overload_name}".rstrip(".")
        if schema.name.startswith("aten::") and torch._C._dispatch_has_kernel(name):
            composite = registered(name, "CompositeImplicitAutograd")
            if composite and registered(name, "Autograd") and not registered(name, "CPU"):
                yield name


def test_the_listed_ops_are_those_of_the_installed_torch():
    ours = {op.name() for op in ONE_KERNEL}
    assert {*whole_somewhere()} == ours | OF_OTHER_DEVICES
    if torch.backends.cuda.is_built():
        assert {name for name in whole_somewhere() if registered(name, "CUDA")} == ours


# ------------------------------------------------------------------ what differs in another way


class _Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "aten":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def seen(function, device):
    """What a call is made of on a device, and what it returns; a failure is something else."""

    def draw(*shape, dtype=HALF):
        return torch.empty(shape, dtype=dtype, device=device)

    with FakeTensorMode(allow_non_fake_inputs=True), _Calls() as calls:
        try:
            results = tree_leaves(function(draw))
        except (RuntimeError, AttributeError, AssertionError) as error:
            return type(error)
    return calls.names, [(t.shape, t.stride(), t.dtype) for t in results]


CALLS = {
    "rms_norm": lambda t: F.rms_norm(t(2, 3, 8), [8], t(8)),
    "layer_norm": lambda t: torch.native_layer_norm(t(2, 3, 8), [8], t(8), t(8), 1e-5),
    "group_norm": lambda t: torch.native_group_norm(t(2, 4, 8), t(4), t(4), 2, 4, 8, 2, 1e-5),
    "instance_norm": lambda t: F.instance_norm(t(2, 4, 8)),
    "embedding_bag": lambda t: F.embedding_bag(t(2, 3, dtype=torch.int64), t(5, 4)),
    "embedding": lambda t: F.embedding(t(2, 3, dtype=torch.int64), t(5, 4)),
    "cross_entropy": lambda t: F.cross_entropy(t(4, 5), t(4, dtype=torch.int64)),
    "nll_loss": lambda t: F.nll_loss(t(4, 5), t(4, dtype=torch.int64)),
    "kl_div": lambda t: F.kl_div(t(4, 5), t(4, 5)),
    "mse_loss": lambda t: F.mse_loss(t(4, 5), t(4, 5)),
    "cosine_similarity": lambda t: F.cosine_similarity(t(3, 4), t(3, 4)),
    "attention": lambda t: F.scaled_dot_product_attention(*(t(2, 2, 8, 8) for _ in range(3))),
    "linear": lambda t: F.linear(t(2, 3, 4), t(5, 4), t(5)),
    "matmul": lambda t: t(2, 3, 4) @ t(4, 5),
    "einsum": lambda t: torch.einsum("bij,jk->bik", t(2, 3, 4), t(4, 5)),
    "bilinear": lambda t: F.bilinear(t(3, 4), t(3, 5), t(6, 4, 5)),
    "conv1d": lambda t: F.conv1d(t(2, 3, 8), t(4, 3, 3)),
    "max_pool2d": lambda t: F.max_pool2d(t(2, 3, 8, 8), 2),
    "interpolate": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2, mode="bilinear"),
    "softmax": lambda t: F.softmax(t(3, 4), -1),
    "log_softmax": lambda t: F.log_softmax(t(3, 4), -1),
    "gelu": lambda t: F.gelu(t(3, 4)),
    "silu": lambda t: F.silu(t(3, 4)),
    "std": lambda t: torch.std(t(3, 4), -1),
    "cumsum": lambda t: torch.cumsum(t(3, 4), 0),
    "topk": lambda t: torch.topk(t(3, 4), 2),
    "dropout": lambda t: F.dropout(t(3, 4)),
    "channel_shuffle": lambda t: torch.native_channel_shuffle(t(2, 4, 4, 4), 2),
    "gru_cell": lambda t: torch.gru_cell(t(2, 4), t(2, 5), t(15, 4), t(15, 5)),
    "grid_sample": lambda t: F.grid_sample(t(2, 3, 8, 8), t(2, 4, 4, 2), align_corners=False),
}
# Name -> how that is met.
DIFFERENT = {
    "layer_norm": "its statistics are float32: `layout_keys.py`, `dense.py`",
    "attention": "`dcpc::attention` on any device",
    "dropout": "numbers of a seed on any device",
    "channel_shuffle": "one kernel on the CPU, views and a copy there: neither keeps anything",
    "gru_cell": "a fused kernel keeps five numbers a unit: docs/limits.md",
    "grid_sample": "cuDNN's kernel of the same operands",
}


def test_what_else_torch_makes_otherwise_on_a_gpu_is_known():
    found = {n for n, call in CALLS.items() if seen(call, "cpu") != seen(call, "cuda")}
    # The last two of a torch that is built for CUDA; releases lack one or the other.
    assert found - {*DIFFERENT, "rms_norm", "instance_norm"} == set()
    assert {*DIFFERENT} - found <= {"grid_sample"}


# ----------------------------------------------------------------------------------- as captured


def piece(call, shapes, gpu, dtype=HALF):
    """The ops of forward and backward of a call on operands that learn."""
    library = Library({}, gpu)
    graph = torch.fx.Graph()
    nodes = []
    for shape in shapes:
        nodes.append(graph.placeholder(f"x{len(nodes)}"))
        with library.mode:
            nodes[-1].meta["val"] = torch.empty(shape, dtype=dtype)
    x, *more = nodes
    made = library.piece(call, (x, [shapes[0][-1]], *more), {}, {*nodes})
    gradient = {made.flows[0]: nodes[0].meta["val"]}
    return made.ops, library.derivative(made, gradient, {}).ops


def test_rms_norm_is_one_kernel_where_a_gpu_is_planned_for():
    forward, backward = piece(aten.rms_norm.default, [(2, 3, 8), (8,)], gpu=True)
    assert [op.target for op in forward if op.target is not aten.detach.default] == [*ONE_KERNEL]
    assert [op.target for op in backward if op.target is not aten.detach.default] == [
        aten._fused_rms_norm_backward.default
    ]
    (made,) = (op.value for op in forward if op.target in ONE_KERNEL)
    assert [(t.dtype, tuple(t.shape)) for t in made] == [
        (HALF, (2, 3, 8)), (torch.float32, (2, 3, 1)),
    ]  # fmt: skip


def test_rms_norm_is_taken_apart_for_the_cpu():
    forward, _ = piece(aten.rms_norm.default, [(2, 3, 8), (8,)], gpu=False)
    targets = [op.target for op in forward]
    assert aten.rsqrt.default in targets
    assert not {*ONE_KERNEL} & {*targets}


@pytest.mark.parametrize(("gpu", "dtype"), [(True, torch.float32), (False, HALF)])
def test_a_gpus_layer_norm_keeps_wide_statistics(gpu, dtype):
    forward, _ = piece(aten.layer_norm.default, [(2, 3, 8), (8,), (8,)], gpu)
    (made,) = (op.value for op in forward if op.target is aten.native_layer_norm.default)
    assert [t.dtype for t in made] == [HALF, dtype, dtype]


def test_other_threads_capture_as_before():
    names = []

    def capture():
        with FakeTensorMode(), enable_python_dispatcher(), _Calls() as calls:
            F.rms_norm(torch.empty(2, 8), [8])
        names.extend(calls.names)

    with as_on_gpu(True):
        thread = threading.Thread(target=capture)
        thread.start()
        thread.join()
        assert "aten::rsqrt" in names
        names.clear()
        capture()
        assert "aten::_fused_rms_norm" in names


@pytest.mark.parametrize("weighted", [True, False])
def test_the_cpus_kernel_of_the_backward_is_the_derivative(weighted):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True) if weighted else None
    gradient = torch.randn(3, 5, 8, dtype=torch.float64)
    learn = [x, weight] if weighted else [x]
    expected = torch.autograd.grad(F.rms_norm(x, [8], weight, 1e-6), learn, gradient)
    with torch.no_grad():
        _, row = aten._fused_rms_norm(x, [8], weight, 1e-6)
        found = aten._fused_rms_norm_backward(gradient, x, [8], row, weight, [True, weighted])
    for got, want in zip(found, expected, strict=False):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------- planned


def gpt(dtype):
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=64, dim=32, n_layers=2, n_heads=2)).to(dtype)


def saved_bytes(device):
    buckets = dcpc.Buckets(TEXT, [{"seq": 32}])
    found = plan(gpt(HALF), buckets, device=device, memory=1e9, recompute="none")
    sizes = {"seq": 32, "batch": 1}
    priced = found.runnable.priced
    return priced.at(priced.placement(sizes, 1)).predict(0, sizes).saved_bytes / 32


def test_a_plan_for_a_gpu_saves_what_its_kernels_save():
    """Of five norms of width 32: not 2 float32 values a number and more, but one a row."""
    cpu, gpu = saved_bytes("cpu"), saved_bytes("h100")
    assert 5 * 32 * 4 <= cpu - gpu <= 5 * 32 * 8


def test_a_model_planned_for_a_gpu_trains_on_the_cpu():
    model = gpt(torch.float64)
    buckets = dcpc.Buckets(TEXT, [{"seq": 16}])
    inputs = {n: torch.randint(64, (2, 16)) for n in TEXT}
    expected = plain(model, inputs)
    compiled = dcpc.compile(model, buckets, device=find("h100"), memory=1e9, verify="full")
    found = compiled(**inputs)
    found.backward()
    assert abs(float(found.detach() - expected.loss)) < 1e-12
    assert max(gradient_errors(model, expected.gradients).values()) < 1e-10
