"""Each private name of PyTorch that uniclip uses is missing in turn.

`uniclip.backends.torch.private` has all of them, and says what happens without each.
"""

from __future__ import annotations

import ast
import json
import multiprocessing
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

MODULE = "uniclip.backends.torch.private"
PACKAGE = Path(__file__).parent.parent / "src" / "uniclip"
SOURCE = (PACKAGE / "backends" / "torch" / "private.py").read_text(encoding="utf-8")


# --- What is done without a name. Each function returns plain data.


def grads(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[torch.Tensor]:
    """Return a long gradient and short ones; with scale 1, their norm is far above 1."""
    shapes = [(9000,), (4, 3), (5,), (3, 2)]
    return [scale * torch.linspace(-1, 2, torch.Size(s).numel()).view(s).to(dtype) for s in shapes]


def shown(tensors: Any) -> list[Any]:
    """Return the first numbers of tensors."""
    return [tensor.detach().flatten()[:4].tolist() for tensor in tensors]


def norm_rule() -> Any:
    """Return a rule with one norm."""
    import uniclip as uc

    return uc.by_global_norm(1.0)


def clip(tree: Any, rule: Any = None) -> Any:
    """Return clipped gradients."""
    import uniclip as uc

    return uc.clip(tree, rule or norm_rule())[0]


def clip_in_place(tree: Any, rule: Any = None) -> Any:
    """Return gradients that were clipped in place."""
    import uniclip as uc

    uc.clip_(tree, rule or norm_rule())
    return tree


def one() -> torch.Tensor:
    """Return a short gradient."""
    return torch.tensor([3.0, -4.0])


def on_cpu() -> Any:
    """Clip dense gradients on the CPU, in one vector, in rows and one by one."""
    import uniclip as uc

    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for rule in (norm_rule(), uc.by_norm(0.5)):
            found.append(shown(clip(grads(dtype), rule)))
            found.append(shown(clip_in_place(grads(dtype), rule)))
    return found


def divided() -> Any:
    """Divide gradients in place, as in engines."""
    from uniclip.backends.torch import private

    tree = grads()
    private.foreach_div_(tree, 4.0)
    return shown(tree)


def on_an_accelerator() -> Any:
    """Clip dense gradients that report an accelerator."""
    import uniclip as uc
    from kit.devices import on_torch

    rules = [norm_rule(), uc.by_norm(0.5), uc.by_value(-0.5, 0.25), uc.agc(0.01)]
    rules.append(uc.by_global_norm(1.0, nonfinite="skip"))
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for rule in rules:
            tree, own = grads(dtype), grads(dtype)
            params = grads(dtype) if rule == uc.agc(0.01) else None
            with on_torch():
                clipped, _ = uc.clip(tree, rule, params)
                uc.clip_(own, rule, params)
            found += [shown(clipped), shown(own)]
    return found


def sparse(*, coalesced: bool) -> Any:
    """Clip a sparse gradient in place."""
    made = torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), torch.tensor([3.0, 1.0, 3.0]), (4,))
    made = made.coalesce() if coalesced else made
    tree = clip_in_place([made, one()])
    return shown([tree[0].to_dense(), tree[1]])


def opaque() -> Any:
    """Try to clip a tensor with a layout of a library."""
    return shown(clip([torch.ones(3, 3).to_mkldnn()]))


def fake() -> Any:
    """Clip fake tensors in their mode and outside of it, and those of functionalize."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    with mode:
        inside = torch.ones(3)
        found = [type(clip([inside])[0]).__name__]
    functional = torch.func.functionalize(lambda g: clip([g])[0])
    found.append(shown([functional(one())]))
    outside = clip([inside])[0]
    return [*found, type(outside).__name__]


def wrapped() -> Any:
    """Return which tensors have no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
    from torch.testing._internal.two_tensor import TwoTensor

    from uniclip.backends.torch.modes import valueless

    with FunctionalTensorMode():
        functional = FunctionalTensor.to_functional(torch.ones(3))
    with FakeTensorMode():
        single = torch.ones(3)
        several = TwoTensor(single, torch.ones(3))
    return [valueless(x) for x in (functional, single, several, one())]


def traced(**options: Any) -> Any:
    """Record a clip, and run it on other values: the norm is not that of the first ones."""
    graph = make_fx(lambda g: clip([g])[0], **options)(one())
    return shown([graph(torch.tensor([0.3, 0.4])), graph(torch.tensor([30.0, 40.0]))])


def scripted() -> Any:
    """Do the same by ``torch.jit.trace``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = torch.jit.trace(lambda g: clip([g])[0], one(), check_trace=False)
    return shown([graph(torch.tensor([0.3, 0.4])), graph(torch.tensor([30.0, 40.0]))])


def flagged() -> Any:
    """Return whether code is traced while PyTorch says so."""
    from uniclip.backends.torch.modes import tracing

    with mock.patch.object(torch.compiler, "_is_compiling_flag", True):
        return [tracing()]


def transformed() -> Any:
    """Clip inside of ``torch.func``."""
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    by_row = torch.func.vmap(lambda g: clip([g])[0])(rows)
    slope = torch.func.grad(lambda g: clip([g])[0][0])(one())
    return shown([by_row, slope])


def shared() -> Any:
    """Clip in place, under ``vmap``, one tensor for all examples."""
    own = torch.ones(2)

    def change(g: torch.Tensor) -> torch.Tensor:
        return clip_in_place([own, g])[1] * 1.0

    return shown([torch.func.vmap(change)(torch.ones(3, 2)), own])


def own_examples() -> Any:
    """Clip in place, under ``vmap``, a tensor of each example."""
    return shown([torch.func.vmap(lambda g: clip_in_place([g * 5.0])[0])(torch.ones(3, 2))])


def in_functions() -> Any:
    """Return where ``torch.func`` transforms the caller."""
    from uniclip.backends.torch.modes import in_transform

    return [in_transform(), torch.func.vmap(lambda g: g * in_transform())(one()).tolist()]


def forward() -> Any:
    """Compute a derivative in forward mode, and none."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(one(), torch.tensor([1.0, 0.0]))
        slope = forward_ad.unpack_dual(clip([dual])[0]).tangent
    return shown([slope, clip([one()])[0]])


def counted() -> Any:
    """Clip in a mode that sees all operations."""
    seen = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Counting():
        clipped = clip(grads())
    assert seen
    return shown(clipped)


def on_default_device() -> Any:
    """Clip on the CPU while new tensors are made elsewhere."""
    import uniclip as uc

    tree, own = [one()], [one()]
    with torch.device("meta"):
        return [shown(clip(tree)), shown(clip_in_place(own, uc.by_block_rms(1.0)))]


def plain_context() -> Any:
    """Return the type of the context for new tensors."""
    from uniclip.backends.torch.modes import default_device_of

    return [default_device_of(one()) is None]


def compiler_rules() -> Any:
    """Import what only compilers before PyTorch 2.11 need."""
    from uniclip.backends.torch import between_graphs

    assert between_graphs
    return shown(clip([one()]))


# --- Optimizers


def optimizer(rule: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    """Return a parameter with a gradient, and an optimizer with a rule."""
    from uniclip.integrations.torch import attach

    param = torch.nn.Parameter(torch.zeros(2))
    made = torch.optim.SGD([param], lr=1.0)
    param.grad = one()
    vars(made).update(options)
    handle = attach(made, rule or norm_rule())
    return param, made, handle


def steps() -> Any:
    """Take a step, with a hook that enlarges gradients before they are clipped."""
    from uniclip.integrations.torch import attach

    param = torch.nn.Parameter(torch.zeros(2))
    made = torch.optim.SGD([param], lr=1.0)
    made.register_step_pre_hook(lambda *_: [param.grad.mul_(10)].clear())
    attach(made, norm_rule())
    param.grad = one()
    made.step()
    return shown([param])


def two_steps() -> Any:
    """Step a list of optimizers, of which a hook changes the gradients of the second."""
    from uniclip.integrations.torch import attach

    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    made = [torch.optim.SGD([param], lr=1.0) for param in params]
    attach(made, norm_rule())
    for param in params:
        param.grad = one()
    for single in made:
        single.step()
    supports = [hasattr(single, "_step_supports_amp_scaling") for single in made]
    return [shown(params), *supports]


def saves() -> Any:
    """Return whether the state of a rule is with that of an optimizer."""
    import uniclip as uc

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, made, _ = optimizer(uc.zclip())
        return [list(made.state_dict())]


def inside() -> Any:
    """Take a step inside of a backward pass."""
    param, made, _ = optimizer()
    param.grad = None
    param.register_post_accumulate_grad_hook(lambda _: made.step())
    (param * one()).sum().backward()
    return shown([param])


def moved() -> Any:
    """Return whether changes of tensors are noticed: none, a late element, the first, an object."""
    from uniclip.integrations.torch.snapshot import Snapshot

    tensor = torch.zeros(100)
    snapshot = Snapshot([tensor])
    before = snapshot.has_changed([tensor])
    tensor[50] = 1.0
    late = snapshot.has_changed([tensor])
    tensor[0] = 1.0
    return [before, late, snapshot.has_changed([tensor]), snapshot.has_changed([torch.zeros(100)])]


def scheduled() -> Any:
    """Skip the first step, which runs no hooks, before that of a scheduler."""
    import uniclip as uc
    from uniclip.integrations.torch import attach

    param = torch.nn.Parameter(torch.zeros(2))
    made = torch.optim.SGD([param], lr=1.0)
    made.step = MethodType(lambda _: None, made)
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda _: 1.0)
    attach(made, uc.by_global_norm(1.0, nonfinite="skip"))
    param.grad = torch.tensor([torch.nan, 1.0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.step()
        scheduler.step()
    return [str(warning.message)[:60] for warning in caught]


def overlapping() -> Any:
    """Attach to an optimizer that steps inside of backward."""
    param, made, _ = optimizer(_overlap_with_ddp=True)
    made.step()
    return shown([param])


def marked(rule: Any, **marks: Any) -> Any:
    """Clip parameters that FSDP1 has marked, as in several processes."""
    from uniclip.integrations.torch import processes

    param = torch.nn.Parameter(torch.zeros(2))
    vars(param).update(marks)
    step: Any = SimpleNamespace(all_reduce=None, shared=None)
    with mock.patch.object(processes, "several", return_value=True):
        processes.check_shards([param], "params", rule, step)
    return "taken"


def shards() -> Any:
    """Clip a shard of FSDP1."""
    return marked(norm_rule(), _fsdp_flattened=True)


def whole() -> Any:
    """Clip a flat parameter of FSDP1 that is whole."""
    size = torch.Size([2])
    marks = {"_is_flat_param": True, "_unpadded_unsharded_size": size}
    return marked(norm_rule(), _fsdp_flattened=True, **marks)


def whole_by_leaf() -> Any:
    """Clip the same by a norm for each leaf."""
    import uniclip as uc

    marks = {"_is_flat_param": True, "_unpadded_unsharded_size": torch.Size([2])}
    return marked(uc.by_norm(1.0), _fsdp_flattened=True, **marks)


# --- Distributed tensors


def distributed_tensors() -> Any:
    """Clip distributed tensors, by several rules and in several layouts."""
    import uniclip as uc

    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    found = []
    for layout in (Shard(0), Replicate(), Shard(0)):
        for rule in (norm_rule(), uc.by_norm(0.5), uc.by_block_rms(1.0)):
            tree = [distribute_tensor(x, mesh, [layout]) for x in grads()]
            clipped = clip(tree, rule)
            assert all(isinstance(x, DTensor) for x in clipped)
            own = clip_in_place([*tree, one()], rule)[:-1]
            found += [shown([x.to_local() for x in leaves]) for leaves in (clipped, own)]
    distributed.destroy_process_group()
    return found


def layouts() -> Any:
    """Return whether the layouts of distributed tensors are cached."""
    from uniclip.backends.torch import dtensor

    distributed_tensors()
    return bool(dtensor._shards_by_layouts)


# --- GPUs


def of_gpu(name: str, *args: int) -> Any:
    """Return what a function says of a GPU, where PyTorch's public ones say what is made up."""
    from uniclip.backends.torch import private

    stream = SimpleNamespace(cuda_stream=7, sycl_queue=8)
    with (
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
        mock.patch.object(torch.xpu, "current_stream", return_value=stream),
    ):
        function = getattr(private, name)
        return function(*args) if args else function.__name__


OPERATIONS: dict[str, Callable[[], Any]] = {
    function.__name__: function
    for function in (
        on_cpu,
        on_an_accelerator,
        opaque,
        fake,
        wrapped,
        scripted,
        flagged,
        transformed,
        shared,
        own_examples,
        in_functions,
        forward,
        counted,
        on_default_device,
        plain_context,
        compiler_rules,
        steps,
        two_steps,
        saves,
        inside,
        moved,
        scheduled,
        overlapping,
        shards,
        whole,
        whole_by_leaf,
        distributed_tensors,
        layouts,
    )
} | {
    "divided": divided,
    "CUDA stream": lambda: of_gpu("cuda_stream", 0),
    "XPU stream": lambda: of_gpu("xpu_stream", 0),
    "CUDA device": lambda: of_gpu("cuda_device"),
    "CUDA captures": lambda: of_gpu("cuda_captures"),
    "coalesced": lambda: sparse(coalesced=True),
    "uncoalesced": lambda: sparse(coalesced=False),
    "traced": traced,
    "traced early": lambda: traced(pre_dispatch=True),
    "traced with fakes": lambda: traced(tracing_mode="symbolic"),
}


FUNCTORCH = "uniclip does not know how PyTorch .* transforms functions .*; install a later"
MODES = ("counted", "fake", "traced", "traced early")
VMAP = {"shared": FUNCTORCH, "own_examples": FUNCTORCH}
WITHOUT_FAKES = {"fake": "AssertionError: Please convert all Tensors to FakeTensors first"}
CASES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    # Functions of lists.
    "_foreach_mul": (("on_cpu", "on_an_accelerator", "counted"), {}),
    "_foreach_mul_": (("on_cpu", "on_an_accelerator", "steps"), {}),
    "_foreach_div_": (("divided",), {}),
    "_foreach_norm": (("on_cpu", "on_an_accelerator"), {}),
    "_foreach_clamp_min": (("on_an_accelerator",), {}),
    "_foreach_clamp_min_": (("on_an_accelerator",), {}),
    "_foreach_clamp_max_": (("on_an_accelerator",), {}),
    "_foreach_copy_": (("on_an_accelerator",), {}),
    "_nn": (("on_cpu",), {}),
    "flatten_dense_tensors": (("on_cpu",), {}),
    # Attributes of tensors.
    "_values": (("coalesced",), {"uncoalesced": "RuntimeError: Cannot get values on an unco"}),
    "_mkldnn": ((), {"opaque": r"its layout, torch\._mkldnn, cannot be clipped; use to_sp"}),
    "_version": ((), {"moved": re.escape("[false, false, true, true]")}),
    "_local_tensor": (("distributed_tensors",), {}),
    "_spec": (("distributed_tensors",), {"layouts": "false"}),
    "_fsdp_flattened": (("whole",), {"shards": "taken", "whole_by_leaf": "taken"}),
    "_is_flat_param": (("shards", "whole"), {"whole_by_leaf": "taken"}),
    "_unpadded_unsharded_size": (("shards",), {"whole": "each process has only a shard"}),
    "FakeTensor": (("wrapped", "traced with fakes"), WITHOUT_FAKES),
    "is_fake": (("fake",), {"wrapped": re.escape("[true, true, false, false]")}),
    "FunctionalTensor": (("fake",), {"wrapped": re.escape("[false, true, true, false]")}),
    "torch._subclasses.fake_tensor": (("traced with fakes",), WITHOUT_FAKES),
    "torch._subclasses.functional_tensor": (("fake", "traced"), {}),
    # The state around the running code.
    "_C": ((), {"on_cpu": FUNCTORCH}),
    "_len_torch_dispatch_stack": (("on_an_accelerator", *MODES), {}),
    "_len_torch_function_stack": (("on_default_device", *MODES), {"plain_context": "false"}),
    "_is_tracing": (("scripted",), {}),
    "_TorchDispatchModeKey": (MODES, {}),
    "FAKE": (MODES, {}),
    "PROXY": (MODES, {}),
    "FUNCTIONAL": (MODES, {}),
    "_get_dispatch_mode": (MODES, {}),
    "DispatchKey": (("on_default_device", *MODES), {}),
    "PreDispatch": (("on_default_device", *MODES), {}),
    "_dispatch_tls_is_dispatch_key_included": (("on_default_device", *MODES), {}),
    "_functorch": (("transformed", "in_functions"), VMAP),
    "get_dynamic_layer_stack_depth": (("transformed", "in_functions", *VMAP), {}),
    "_are_functorch_transforms_active": (("transformed", "in_functions", *VMAP), {}),
    "get_interpreter_stack": (("transformed",), VMAP),
    "TransformType": (("transformed",), VMAP),
    "is_functorch_wrapped_tensor": (("transformed",), VMAP),
    "maybe_get_level": (("transformed",), VMAP),
    "get_unwrapped": (("transformed",), VMAP),
    "_is_compiling_flag": (("flagged", "traced"), {}),
    "_current_level": (("forward", "steps"), {}),
    "_current_graph_task_id": (("steps",), {"inside": r"\[\[-0\.6"}),
    "DeviceContext": (("on_default_device",), {}),
    "torch.utils._device": (("on_default_device",), {}),
    "torch._dynamo": (("compiler_rules",), {}),
    # GPUs.
    "_cuda_getCurrentRawStream": ((), {"CUDA stream": "7"}),
    "_xpu_getCurrentRawStream": ((), {"XPU stream": "8"}),
    "_cuda_getDevice": ((), {"CUDA device": '"current_device"'}),
    "_cuda_isCurrentStreamCapturing": ((), {"CUDA captures": '"is_current_stream_capturing"'}),
    # Attributes of optimizers and schedulers.
    "_optimizer_step_pre_hooks": (("two_steps",), {"steps": re.escape("[[-6.0, 8.0]]")}),
    "_optimizer_state_dict_post_hooks": (("steps",), {"saves": '"param_groups"]]'}),
    "_step_supports_amp_scaling": ((), {"two_steps": "false, false"}),
    "_overlap_with_ddp": ((), {"overlapping": r"\[\[-0\.6"}),
    "_wrapped_by_lr_sched": (("steps",), {"scheduled": "Seems like `optimizer.step.*has been ov"}),
    "_opt_called": (("steps",), {"scheduled": "Detected call of `lr_scheduler.step"}),
}
"""What comes out without each name: which operations as with it, and which otherwise, and how."""


def operations_of(name: str) -> list[str]:
    """Return the operations to run without a name; all of them with all names."""
    if not name:
        return list(OPERATIONS)
    same, other = CASES[name]
    return [*same, *other]


def outcome(operation: str) -> str:
    """Return what an operation comes to: its data, or its error."""
    try:
        return json.dumps(OPERATIONS[operation]())
    except Exception as error:  # noqa: BLE001 - the error is the outcome
        return f"{type(error).__name__}: {error}"


def without(name: str) -> str:
    """Return a source in which uniclip looks for a name that PyTorch does not have."""
    if f'"{name}"' in SOURCE:
        return SOURCE.replace(f'"{name}"', '"gone_"')
    if name.startswith("torch."):
        return re.sub(rf"from {re.escape(name)} import", "from torch.gone_ import", SOURCE)
    return re.sub(rf"\.{name}\b", ".gone_", SOURCE)


def run(name: str) -> dict[str, str]:
    """Return outcomes without a name, in a process that has not imported uniclip yet."""
    assert MODULE not in sys.modules
    source = without(name) if name else SOURCE
    assert (source == SOURCE) == (name == "")

    # The other modules find this one, and not the file.
    module = module_from_spec(spec_from_loader(MODULE, loader=None))
    exec(compile(source, MODULE, "exec"), vars(module))  # noqa: S102 - our own source
    sys.modules[MODULE] = module
    return {operation: outcome(operation) for operation in operations_of(name)}


def names_in(source: str) -> set[str]:
    """Return the names that a module of ours looks up in PyTorch."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"\w+|torch[\w.]*\._?\w+(?<!_functorch)", node.value):
                found.add(node.value)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "_functorch":
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and "._" in f"{node.module}":
            found.add(str(node.module))
    return found


# --- Tests

pytestmark = pytest.mark.xdist_group("private")


@cache
def outcomes() -> dict[str, dict[str, str]]:
    """Return the outcomes with all names, and without each, of processes of their own."""
    command = [sys.executable, __file__, *CASES]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_name_is_missing(name: str) -> None:
    """Without a name, all is as with it, or comes out as the module says."""
    with_all, found = outcomes()[""], outcomes()[name]
    same, other = CASES[name]
    for operation in same:
        assert found[operation] == with_all[operation], operation
    for operation, pattern in other.items():
        assert re.search(pattern, found[operation]), found[operation]


def test_all_names_work() -> None:
    """With all names, the operations that are not refused have a result."""
    refused = {"opaque", "shared", "inside", "overlapping", "shards", "whole_by_leaf"}
    # PyTorch for CUDA has the function, which needs a driver.
    if torch.backends.cuda.is_built() and not torch.cuda.is_available():
        refused.add("CUDA stream")
    found = outcomes()[""]
    assert {name for name, value in found.items() if "Error: " in value} == refused, found


def test_every_name_has_a_case() -> None:
    """The module looks up no other names, and these have cases."""
    assert names_in(SOURCE) == set(CASES)


def private_in(tree: ast.AST) -> list[str]:
    """Return the private names of PyTorch in a module."""
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if not name.startswith("self."):
                names = [name if name.startswith("torch.") else node.attr]
        elif isinstance(node, ast.Constant):
            names = [str(node.value)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        of_torch = re.compile(r"torch\.([\w.]+\.)?_(?!_)[\w.]+")
        known = {name for name in CASES if name.startswith("_")}
        found += [name for name in names if of_torch.fullmatch(name) or name in known]
    return found


def test_no_other_module_has_private_names() -> None:
    """All other modules take them from that one."""
    assert private_in(ast.parse("import torch._x; torch.y._z(a._spec, '_spec', torch.__version__)"))
    found = {}
    for path in (*PACKAGE.glob("backends/**/*.py"), *PACKAGE.glob("integrations/**/*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        found[name] = private_in(ast.parse(path.read_text(encoding="utf-8")))
    assert found.pop("backends/torch/private.py")
    # A key of `sys.modules`, which is looked up before PyTorch is imported.
    assert found.pop("backends/__init__.py") == ["torch._dynamo"]
    assert {name: names for name, names in found.items() if names} == {}


if __name__ == "__main__":
    # It notes attributes of tensors, which `on_torch` replaces.
    import torch._dynamo

    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        names = ["", *sys.argv[1:]]
        print(json.dumps(dict(zip(names, pool.map(run, names, chunksize=1), strict=True))))  # noqa: T201
