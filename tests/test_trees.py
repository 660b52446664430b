"""Trees of gradients: containers of every kind, and the array types of each framework."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import types
from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import pytest

import uniclip as uc
from kit.frameworks import Framework
from kit.trees import close
from kit.trees import leaves as leaves_of
from uniclip.saved import to_dict


class Pair(NamedTuple):
    """A named tuple of gradients."""

    w: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Layer:
    """A frozen dataclass of gradients, with a field that ``__init__`` does not take."""

    w: Any
    b: Any = None
    cache: Any = dataclasses.field(default=None, init=False)


class Tracked(collections.OrderedDict[str, Any]):
    """A custom ordered mapping, as Keras makes of the attributes of its objects."""


class Sorted(dict[str, Any]):
    """A custom dict."""


class Parameters(list[Any]):
    """A custom list, as frameworks have them."""


VALUES = lambda tree: [*tree.values()]
CONTAINERS: dict[str, tuple[Callable[[Any, Any], Any], type, Callable[[Any], list[Any]]]] = {
    "list": (lambda a, b: [a, b], list, list),
    "tuple": (lambda a, b: (a, None, b), tuple, lambda tree: [tree[0], tree[2]]),
    "deque": (lambda a, b: collections.deque([a, b]), collections.deque, list),
    "namedtuple": (Pair, Pair, list),
    "list subclass": (lambda a, b: Parameters([a, b]), list, list),
    "generator": (lambda a, b: (x for x in (a, b)), list, list),
    "values": (lambda a, b: {"z": a, "a": b}.values(), list, list),
    "subclasses inside": (
        lambda a, b: {"x": Parameters([None, Sorted(a=a)]), "y": collections.deque([Layer(b)])},
        dict,
        lambda tree: [tree["x"][1]["a"], tree["y"][0].w],
    ),
    "dict": (lambda a, b: {"z": a, "a": b}, dict, VALUES),
    "keys of two kinds": (
        lambda a, b: {1: a, "x": b, (0,): None},
        dict,
        lambda tree: [tree[1], tree["x"]],
    ),
    "OrderedDict": (
        lambda a, b: collections.OrderedDict(z=a, a=b),
        collections.OrderedDict,
        VALUES,
    ),
    "defaultdict": (
        lambda a, b: collections.defaultdict(list, z=a, a=b),
        collections.defaultdict,
        VALUES,
    ),
    "OrderedDict subclass": (lambda a, b: Tracked(z=a, a=b), collections.OrderedDict, VALUES),
    "dict subclass": (lambda a, b: Sorted(z=a, a=b), dict, VALUES),
    "mapping": (lambda a, b: types.MappingProxyType({"z": a, "a": b}), object, VALUES),
    "UserDict": (lambda a, b: collections.UserDict(z=a, a=b), object, VALUES),
    "dataclass": (
        lambda a, b: Layer(a, {"deep": [b]}),
        Layer,
        lambda tree: [tree.w, tree.b["deep"][0]],
    ),
}
"""How each is made of two leaves, the result, and the place of its leaves."""


@pytest.mark.only("numpy", "torch", "tensorflow", "jax")
@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(framework: Framework, name: str) -> None:
    """Containers keep their type; iterators and views become lists.

    The inputs and their arrays never change.
    """
    (make, kind, leaves), arrays = (
        CONTAINERS[name],
        (framework.array([3.0]), framework.array([4.0])),
    )
    clipped, norm = uc.clip_by_global_norm(make(*arrays), 1.0)
    assert isinstance(clipped, kind)
    close(framework, norm, 5.0)
    for found, wanted in zip(leaves(clipped), (0.6, 0.8), strict=True):
        close(framework, found, [wanted])
    within = leaves(uc.clip_by_norm(make(*arrays), 9.0))
    if framework.same_objects:
        assert [found is leaf for found, leaf in zip(within, arrays, strict=True)] == [True, True]
    assert [framework.numpy(leaf).item() for leaf in arrays] == [3.0, 4.0]


ORDERED = ("OrderedDict", "OrderedDict subclass")


@pytest.mark.only("numpy", "torch", "tensorflow", "jax")
@pytest.mark.parametrize(
    "name", [*ORDERED, "dict", "dict subclass", "defaultdict", "mapping", "UserDict"]
)
def test_the_order_of_a_mapping(framework: Framework, name: str) -> None:
    """A state belongs to the names of the leaves, whatever mapping the next step comes in."""
    rule, order = uc.norm_growth(1.5), ["['z']", "['a']"] if name in ORDERED else ["['a']", "['z']"]
    make = CONTAINERS[name][0]
    tree = make(framework.array([3.0, 4.0]), framework.array([1.0]))
    _, state, _ = rule.update(tree, rule.init(tree))
    assert to_dict(rule, state, tree)["leaves"] == [order]
    plain = collections.OrderedDict if name in ORDERED else dict
    again = plain(z=framework.array([30.0, 40.0]), a=framework.array([1.0]))
    clipped, _, _ = rule.update(again, state)
    close(framework, clipped["z"], [4.5, 6.0])
    close(framework, clipped["a"], [1.0])


@pytest.mark.needs("numpy")
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_what_is_no_gradient() -> None:
    """An exhausted iterator, and leaves that are no numeric arrays, are refused by their paths."""
    for spent in (iter([]), (x for x in ()), map(abs, []), itertools.chain()):
        with pytest.raises(ValueError, match="iterator"):
            uc.clip_by_global_norm(spent, 1.0)
    no_numbers = (
        np.asarray([True]),
        np.asarray(["x"]),
        np.asarray([None]),
        np.zeros(1, "datetime64[s]"),
    )
    no_arrays = 1.0, "w", object(), {1.0}
    other_arrays = np.ma.masked_array([1.0], [True]), np.asmatrix([1.0])
    for leaf in (*no_numbers, *no_arrays, *other_arrays):
        for clip in (uc.clip, uc.clip_):
            with pytest.raises(TypeError, match=r"grads\['layers'\]\[1\]\['w'\]"):
                clip({"layers": [None, {"w": leaf}]}, uc.by_global_norm(1.0))
    with pytest.raises(TypeError, match=r"grads\['layer'\]\['w'\]"):
        uc.global_norm({"layer": Layer(2.0)})
    layer = Layer(np.asarray([3.0, 4.0]))
    object.__setattr__(layer, "name", "of no field")
    clipped, _ = uc.clip_by_global_norm([layer], 1.0)
    assert (clipped[0].name, layer.w.tolist()) == ("of no field", [3.0, 4.0])
    # A step may have to read them twice.
    for many in (iter([np.ones(2)]), {"w": np.ones(2)}.values()):
        with pytest.raises(TypeError, match=r"grads\['layer'\](.|\n)*as a list"):
            uc.global_norm({"layer": many})


def narrow_rules(uc: Any) -> list[Any]:
    """Return rules for arrays of few bits."""
    return [
        uc.by_global_norm(2.5),
        uc.by_norm(2.5, ord=3),
        uc.by_norm(2.5, axis=-1),
        uc.by_value(-2.0, 2.0),
    ]


@pytest.mark.only("torch", "tensorflow", "jax")
def test_integers_of_sparse_gradients(framework: Framework) -> None:
    """Integers of duplicate rows are summed exactly, beyond float32 and their own dtype."""
    grads = framework.sparse((9, 1), [2, 2], [[2**24], [1]], "int32")
    clipped, _ = uc.clip(grads, uc.by_value(-1, 2**24 + 1))
    assert framework.dense(clipped)[2, 0] == 2**24 + 1
    small = framework.sparse((9, 1), [2, 2], [[100], [100]], "int8")
    assert float(framework.numpy(uc.global_norm(small))) == 200.0
    clipped, _ = uc.clip(small, uc.by_value(-1, 120))
    assert clipped.dtype == small.dtype
    assert framework.dense(clipped)[2, 0] == 120


@pytest.mark.parametrize("scale", [1e25, 1e-25])
def test_what_numpy_warns_about(framework: Framework, scale: float) -> None:
    """Squares beyond float32, and subnormal products, raise neither warnings nor errors."""
    leaf = np.full(5000, scale, np.float32)
    grads = list(map(framework.array, (leaf, [scale, 1e-40])))
    with np.errstate(all="raise"):
        norm = uc.global_norm(grads)
        clipped, _ = uc.clip(grads, uc.by_global_norm(scale))
    np.testing.assert_allclose(framework.numpy(norm), scale * 5001**0.5, rtol=1e-6)
    np.testing.assert_allclose(framework.numpy(clipped[0]), leaf / 5001**0.5, rtol=1e-6)


@pytest.mark.only("torch", "tensorflow", "jax")
def test_nan_in_a_row_that_is_stored_twice(framework: Framework) -> None:
    """Duplicate rows count as their sum after NaN was replaced."""
    grads = framework.sparse((4, 2), [0, 2, 0], [[3.0, 0.0], [0.0, np.nan], [3.0, 0.0]])
    rule = uc.by_global_norm(1.0, nonfinite="zero")
    clipped, report = uc.clip(grads, rule)
    np.testing.assert_allclose(framework.numpy(report.norms), 6.0)
    np.testing.assert_allclose(framework.dense(clipped), [[1, 0], [0, 0], [0, 0], [0, 0]])
    if framework.name == "torch":
        one, wide = framework.array([np.nan]), framework.array([1.0, np.nan]).expand(3, 2)
        # In-place clipping raises even if only NaN would be replaced.
        with pytest.raises(TypeError, match=r"grads\[1\].*in place"):
            uc.clip_([one, wide], uc.by_global_norm(9.0, nonfinite="zero"))
        assert np.isnan(framework.numpy(one)).all()
        np.testing.assert_allclose(framework.numpy(uc.clip_(grads, rule).norms), 6.0)
        np.testing.assert_allclose(framework.dense(grads), framework.dense(clipped))


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_kinds_of_torch() -> None:
    """8-bit floats are clipped as float32 and rounded once; subclasses are kept, in place too."""
    import torch

    own, wide = type("Own", (torch.Tensor,), {}), torch.tensor([3.0, 4.0, -0.5])
    for rule in narrow_rules(uc):
        alone = uc.clip(wide, rule)[0]
        for make in (
            lambda x: x.to(torch.float8_e4m3fn),
            lambda x: x.to(torch.float8_e5m2),
            lambda x: x.as_subclass(own),
        ):
            given = make(wide.clone())
            clipped, _ = uc.clip(given, rule)
            uc.clip_(given, rule)
            for found in (clipped, given):
                assert (found.dtype, type(found)) == (make(alone).dtype, type(make(alone)))
                assert torch.allclose(found.float(), make(alone).float())
    within = torch.ones(2).to(torch.float8_e4m3fn)
    assert uc.clip([within], uc.by_global_norm(2.0))[0][0] is within
    short = torch.tensor([3 + 4j, 0]).to(torch.complex32)
    assert torch.allclose(
        uc.clip(short, uc.by_global_norm(2.5))[0].to(torch.complex64), torch.tensor([1.5 + 2j, 0])
    )
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    changed = rows.clone()
    torch.func.vmap(lambda row: uc.clip_(row, uc.by_norm(1.0)) and row)(changed)
    assert torch.allclose(changed, uc.clip(rows, uc.by_norm(1.0, axis=1))[0])


@pytest.mark.needs("torch")
# PyTorch calls half of these prototypes.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["dequantize", "unbind", "to_sparse_csr", "shape", "grad"])
def test_kinds_that_torch_cannot_clip(name: str) -> None:
    """The error names the leaf and the remedy, before anything is changed."""
    import torch

    first, make = torch.tensor([3.0, 4.0]), {
        "dequantize": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "unbind": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(4)]),
        "to_sparse_csr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
        "shape": torch.nn.parameter.UninitializedBuffer,
        "grad": lambda: torch.nn.Parameter(torch.ones(2)),
    }  # fmt: skip
    for clip in (uc.clip, uc.clip_):
        with pytest.raises(TypeError, match=rf"grads\['w'\].*{name}"):
            clip({"a": first, "w": make[name]()}, uc.by_norm(1.0))
    assert first.tolist() == [3.0, 4.0]


@pytest.mark.needs("tensorflow")
def test_kinds_that_tensorflow_cannot_clip() -> None:
    """The error names the leaf, its dtype and the cast, also in a graph, and the cast works."""
    import tensorflow as tf

    whole = tf.constant([3, 4], tf.int8)
    stored = tf.dtypes.experimental
    for dtype, wider in (
        (stored.float8_e4m3fn, "float32"),
        (stored.float8_e5m2, "float32"),
        (stored.int4, "int8"),
    ):
        leaf = tf.cast(tf.cast(whole, wider), dtype)
        wanted = rf"grads\['w'\].*with {dtype.name}; use tf\.cast\(g, tf\.{wider}\)"
        for rule in (uc.by_global_norm(1.0), uc.by_norm(1.0), uc.by_value(-1.0, 1.0)):
            for run in (uc.clip, tf.function(uc.clip)):
                with pytest.raises(TypeError, match=wanted):
                    run({"b": tf.ones(2), "w": leaf}, rule)
        clipped, _ = uc.clip(tf.cast(leaf, wider), uc.by_global_norm(1.0))
        np.testing.assert_allclose(clipped.numpy(), [0.6, 0.8], rtol=1e-6)


# JAX installs SciPy.
@pytest.mark.needs("jax")
@pytest.mark.parametrize("kind", ["matrix", "array"])
@pytest.mark.parametrize("layout", ["bsr", "coo", "csc", "csr", "dia", "dok", "lil"])
def test_sparse_formats_of_scipy(layout: str, kind: str) -> None:
    """The error names the leaf, its format and the remedy; ``dok`` is a dict of its elements."""
    import scipy.sparse

    leaf = getattr(scipy.sparse, f"{layout}_{kind}")(np.diag([3.0, 4.0]))
    wanted = rf"\['w'\] is a scipy.sparse._{layout}.{layout}_{kind} .*use toarray\(\)"
    for rule in (uc.by_global_norm(1.0), uc.by_norm(1.0), uc.by_value(-1.0, 1.0)):
        # The first leaf of a class is looked up, later ones are known.
        for clip in (uc.clip, uc.clip_, uc.clip):
            with pytest.raises(TypeError, match=wanted):
                clip({"b": np.ones(2), "w": leaf}, rule)
    with pytest.raises(TypeError, match=r"^grads is a scipy"):
        uc.clip(leaf, uc.by_norm(1.0))
    with pytest.raises(TypeError, match=f"params{wanted}"):
        uc.clip({"w": np.ones((2, 2))}, uc.agc(), params={"w": leaf})
    clipped, _ = uc.clip({"w": leaf.toarray()}, uc.by_norm(1.0))
    np.testing.assert_allclose(clipped["w"], np.diag([0.6, 0.8]))


@pytest.mark.parametrize("name", ["int4", "uint4", "float8_e8m0fnu"])
def test_kinds_that_numpy_cannot_clip(name: str) -> None:
    """The error names the leaf, its dtype and the remedy."""
    import ml_dtypes

    leaf = np.asarray([1.0, 4.0]).astype(getattr(ml_dtypes, name))
    wanted = rf"grads\['w'\].*: {name} cannot be clipped; use astype\(np\.float32\)"
    with pytest.raises(TypeError, match=wanted):
        uc.clip({"w": leaf}, uc.by_norm(1.0))
    uc.clip({"w": leaf.astype(np.float32)}, uc.by_norm(1.0))


@pytest.mark.needs("jax")
def test_kinds_of_jax() -> None:
    """8-bit floats are clipped as float32 and rounded once; leaves without numbers are refused."""
    import jax
    import jax.numpy as jnp

    wide, rules = jnp.asarray([3.0, 4.0, -0.5]), narrow_rules(uc)
    wanted = [uc.clip([wide, jnp.ones(2)], rule)[0][0] for rule in rules]
    every = jax.jit(lambda grads: [uc.clip(grads, rule)[0][0] for rule in rules])
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        for found, one in zip(every([wide.astype(dtype), jnp.ones(2)]), wanted, strict=True):
            np.testing.assert_array_equal(found, one.astype(dtype), strict=True)
    for leaf in (jax.random.key(0), jnp.ones(2) > 0):
        with pytest.raises(TypeError, match=r"grads\[1\]"):
            uc.clip([jnp.ones(2), leaf], rules[0])
    with pytest.raises(TypeError, match=r"grads\[1\].*e8m0fnu cannot .*astype\(jnp\.float32\)"):
        uc.clip([jnp.ones(2), jnp.ones(2, "float8_e8m0fnu")], rules[0])


@pytest.mark.needs("jax")
def test_nodes_and_settings_of_jax() -> None:
    """Classes registered with JAX are containers.

    Results are on the device of the gradients; promotion may be strict.
    """
    import jax
    import jax.numpy as jnp

    node = jax.tree_util.register_dataclass(
        dataclasses.make_dataclass("Node", ["one", "two"]), ["one"], ["two"]
    )
    clipped, report = uc.clip(node(jnp.asarray([3.0, 4.0]), "kept"), uc.by_norm(1.0))
    assert (type(clipped), clipped.two, float(report.norms.one)) == (node, "kept", 5.0)
    here, other = jax.devices()[:2]
    grads = jax.device_put(
        {"w": jnp.arange(1.0, 9.0, dtype="bfloat16").reshape(4, 2), "b": jnp.ones(2)}, here
    )
    rules = [uc.by_value(-np.ones(2), np.ones(2)), uc.agc(0.1), uc.zclip(warmup=2)]
    every = lambda grads: [rule.update(grads, rule.init(grads), grads) for rule in rules]
    wanted = jax.jit(every)(grads)
    with jax.default_device(other), jax.numpy_dtype_promotion("strict"):
        found = jax.jit(lambda grads: every(grads))(grads)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.devices() == {here}
        np.testing.assert_array_equal(one, two)


BY_ROW: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "memory": (
        "keeps state",
        lambda fw: uc.Rule(uc.limits.Ema(1.05, 0.9), scope=uc.scopes.axes(1)),
    ),
    "memory of entries": ("keeps state", lambda fw: uc.spam()),
    "limits": ("limit", lambda fw: uc.by_norm(fw.array([1.0, 2.0, 3.0, 4.0]), axis=1)),
    "limits of a group": (
        "limit",
        lambda fw: uc.Rule(
            uc.limits.PerGroup({0: fw.array([1.0, 2.0, 3.0, 4.0])}),
            scope=uc.Scope(label=lambda path, leaf: 0, axes=(1,)),
        ),
    ),
    "bounds": ("bounds", lambda fw: uc.by_value(-1.0, fw.array([[1.0], [2.0], [3.0], [4.0]]))),
    "counts": ("limit", lambda fw: uc.cowclip(fw.array([1.0, 2.0, 3.0, 4.0]))),
}


@pytest.mark.only("torch", "tensorflow", "jax")
@pytest.mark.parametrize("name", BY_ROW)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_value_for_each_row_of_a_sparse_gradient(
    framework: Framework, name: str, in_place: bool
) -> None:
    """A value for each row would follow the storage order of sparse rows, and is refused by name.

    A value for each column is accepted.
    """
    word, make = BY_ROW[name]
    rule, grads = make(framework), [framework.sparse((4, 2), [3, 1, 2, 0], [[3.0, 4.0]] * 4)]
    state = rule.init([framework.array(np.zeros((4, 2)))])
    before = framework.dense(grads[0])
    params = [framework.array(before)]
    with pytest.raises(TypeError, match=rf"grads\[0\](.|\n)*sparse(.|\n)*{word}(.|\n)*each row"):
        rule.update(grads, state, params, in_place=in_place and framework.writes)
    np.testing.assert_array_equal(framework.dense(grads[0]), before)
    dense, _, _ = rule.update([framework.array(before)], state, params)
    assert framework.numpy(dense[0]).shape == (4, 2)
    columns, wide = framework.array([1.0, 9.0]), framework.array([[1.0, 9.0]])
    for fine, wanted in (
        (uc.by_value(-1.0, columns), [1.0, 4.0]),
        (uc.by_value(-1.0, wide), [1.0, 4.0]),
        (uc.by_norm(2.5, axis=1), [1.5, 2.0]),
        (uc.by_norm(framework.array([3.0, 4.0]), axis=0), [1.5, 2.0]),
    ):
        clipped, _ = uc.clip(grads, fine)
        np.testing.assert_allclose(framework.dense(clipped[0]), [wanted] * 4, rtol=1e-6)


@pytest.mark.only("torch", "tensorflow", "jax")
@pytest.mark.parametrize("in_place", [False, True])
def test_parameters_go_by_the_rows_of_a_sparse_gradient(
    framework: Framework, in_place: bool
) -> None:
    """Each row is compared with its row of the parameter, in any storage order and multiplicity."""
    params = framework.array(np.arange(12.0).reshape(6, 2))
    make = lambda: framework.sparse(
        (6, 2), [4, 1, 4, 0], [[9.0, 1.0], [2.0, 8.0], [3.0, 3.0], [0.5, 0.5]]
    )
    for rule in (uc.agc(0.3, axis=1), uc.Rule(uc.limits.Relative(0.1), scope=uc.scopes.each_row)):
        wanted, _ = uc.clip(framework.array(framework.dense(make())), rule, params)
        grads = make()
        clipped = grads if in_place and framework.writes else uc.clip(grads, rule, params)[0]
        if clipped is grads:
            uc.clip_(grads, rule, params)
        np.testing.assert_allclose(framework.dense(clipped), framework.numpy(wanted), rtol=1e-6)


@pytest.mark.needs("torch")
def test_odd_leaves_in_odd_leaves() -> None:
    """Nested wrappers are opened and rebuilt: integers or half precision, of duplicate rows."""
    import torch

    for dtype, wanted in ((torch.int32, torch.float32), (torch.float16, torch.float16)):
        values = torch.tensor([[3, 0], [0, 7], [1, 0]], dtype=dtype)
        leaf = torch.sparse_coo_tensor([[2, 0, 2]], values, (3, 2), check_invariants=False)
        (clipped,), norm = uc.clip_by_global_norm([leaf], 1.0)
        assert clipped.dtype is wanted
        torch.testing.assert_close(norm.item(), 65**0.5)
        np.testing.assert_allclose(clipped.to_dense(), leaf.to_dense().numpy() / 65**0.5, rtol=1e-3)
        assert dtype is torch.int32 or uc.clip_by_global_norm([leaf], 9.0)[0][0] is leaf
        [bounded], _ = uc.clip([leaf], uc.by_value(-5, 5))
        assert bounded.dtype is dtype
        assert bounded.to_dense().tolist() == [[0, 5], [0, 0], [4, 0]]
    entries = torch.sparse_coo_tensor([[0, 1], [1, 0]], [3.0, 4.0], (2, 2), check_invariants=False)
    with pytest.raises(TypeError, match=r"grads\[0\] is sparse, and stores single elements"):
        uc.clip(
            [entries],
            uc.Rule(uc.limits.Relative(0.1), scope=uc.scopes.each_entry),
            [torch.ones(2, 2)],
        )


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    "rule", [uc.by_global_norm(1.0), uc.by_norm(1.0), lambda grad: grad / 5, uc.by_value(-1, 1)]
)
def test_a_sparse_gradient_in_place(rule: Any) -> None:
    """The sum in the same object changes once, and autograd gets a new version."""
    import torch

    leaf = torch.sparse_coo_tensor(
        [[2, 0, 2]], torch.tensor([[1.0], [4.0], [2.0]]), (3, 1), check_invariants=False
    )
    wanted = uc.clip([leaf, leaf], rule)[0][0].to_dense()
    version, grads = leaf._version, [leaf, leaf]
    uc.clip_(grads, rule)
    assert leaf._version > version
    torch.testing.assert_close(leaf.to_dense(), wanted)


@pytest.mark.needs("torch")
def test_the_memory_of_a_sparse_gradient() -> None:
    """A factor is written into the storage of a sparse gradient, which other tensors may share.

    Single elements are written, too.
    """
    import torch

    leaf = torch.sparse_coo_tensor(
        [[2, 0, 2]], torch.tensor([[1.0], [4.0], [2.0]]), (3, 1), check_invariants=False
    )
    uc.clip_([leaf.detach()], uc.by_global_norm(2.5))
    torch.testing.assert_close(leaf.to_dense(), torch.tensor([[2.0], [0.0], [1.5]]))
    places = [[1, 0, 1, 1], [0, 1, 0, 1]]
    entries = torch.sparse_coo_tensor(places, [1.0, 4.0, 2.0, 5.0], (2, 2), check_invariants=False)
    uc.clip_([entries], lambda grad: 2 * grad)
    assert entries.to_dense().tolist() == [[0.0, 8.0], [6.0, 10.0]]


@pytest.mark.only("torch", "tensorflow", "jax")
def test_a_limit_for_each_row_of_another_leaf(framework: Framework) -> None:
    """A value for each row of a dense leaf does not affect a sparse leaf of another group."""
    limits = {"dense": framework.array([1.0, 2.0]), "sparse": 5.0}
    rule = uc.Rule(
        uc.limits.PerGroup(limits), scope=uc.Scope(label=lambda path, leaf: path[0], axes=(1,))
    )
    grads = {
        "dense": framework.array([[3.0, 4.0]] * 2),
        "sparse": framework.sparse((4, 2), [2, 1], [[6.0, 8.0]] * 2),
    }
    clipped, _ = uc.clip(grads, rule)
    np.testing.assert_allclose(
        framework.numpy(clipped["dense"]), [[0.6, 0.8], [1.2, 1.6]], rtol=1e-6
    )
    np.testing.assert_allclose(framework.dense(clipped["sparse"])[1:3], [[3.0, 4.0]] * 2, rtol=1e-6)


@pytest.mark.needs("tensorflow")
def test_slices_of_unknown_shape() -> None:
    """Matrices with an unknown number of rows are clipped by value, also with bounds by column."""
    import tensorflow as tf

    columns = tf.constant([1.0, 2.0])

    def clip(values: Any, rows: Any) -> Any:
        slices = tf.IndexedSlices(values, rows)
        return [
            uc.clip(slices, rule)[0].values
            for rule in (uc.by_value(-1.0, 1.0), uc.by_value(-columns, columns))
        ]

    for run in (clip, tf.function(clip)):
        found = run(tf.constant([[3.0, 4.0]]), tf.constant([7]))
        np.testing.assert_array_equal(found, [[[1.0, 1.0]], [[1.0, 2.0]]])


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_sizes_that_are_known_later(dtype: str) -> None:
    """Means are over all elements of a matrix whose shape is a symbolic value, sparse and dense."""
    import tensorflow as tf

    rule = uc.Rule(math.inf, norm=uc.norms.RMS)

    @tf.function(input_signature=[tf.TensorSpec([None, 2], dtype), tf.TensorSpec([2], tf.int32)])
    def norms(values: Any, shape: Any) -> Any:
        slices = tf.IndexedSlices(values, tf.constant([1, 3]), shape)
        return [uc.clip(grads, rule)[1].norms for grads in (slices, values)]

    np.testing.assert_allclose(
        norms([[3, 3], [3, 3]], [6, 2]), [math.sqrt(36 / 12), 3.0], rtol=1e-6
    )
    with pytest.raises(ValueError, match=r"grads is sparse and has no size"):
        uc.clip(tf.IndexedSlices(tf.constant([[3.0]]), tf.constant([1])), rule)


SHAPES: dict[str, Callable[[Any], Any]] = {
    "a tuple": lambda tf: (4, 2),
    "a list": lambda tf: [4, 2],
    "an array": lambda tf: np.asarray([4, 2]),
    "a tuple with a tensor": lambda tf: (tf.constant(4), 2),
    "a shape": lambda tf: tf.TensorShape([4, 2]),
    "an unknown shape": lambda tf: tf.TensorShape(None),
}


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("name", SHAPES)
def test_a_dense_shape_that_is_no_tensor(name: str) -> None:
    """A dense shape that is no tensor comes back with the slices, and is used like a tensor."""
    import tensorflow as tf

    shape = SHAPES[name](tf)
    slices = tf.IndexedSlices(tf.constant([[3.0, 4.0], [3.0, 4.0]]), tf.constant([1, 1]), shape)
    rules = [
        uc.by_global_norm(5.0),
        uc.by_norm(5.0),
        uc.agc(1.0),
        uc.by_value(-3.0, 3.0),
        uc.by_norm(5.0, axis=(1,)),
    ]
    wanted = [[3.0, 4.0], [3.0, 4.0], [2.0, 2.0], [3.0, 3.0], [3.0, 4.0]]
    # A mean needs a size.
    if name != "an unknown shape":
        rules, wanted = [*rules, uc.by_block_rms(0.5)], [*wanted, [0.6 * 2**0.5, 0.8 * 2**0.5]]
    for rule, row in zip(rules, wanted, strict=True):
        clipped, _ = uc.clip(slices, rule, params=tf.ones((4, 2)))
        np.testing.assert_allclose(clipped.values, [row, [0.0, 0.0]], rtol=1e-6)
        assert clipped.dense_shape is shape


@pytest.mark.needs("tensorflow")
def test_a_dense_shape_of_which_a_part_is_known_later() -> None:
    """A mean is over the number of rows that a symbolic value gives."""
    import tensorflow as tf

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([], tf.int32)])
    def norm(values: Any, rows: Any) -> Any:
        return uc.clip(
            tf.IndexedSlices(values, tf.constant([1, 3]), (rows, 2)), uc.by_block_rms(1.0)
        )[1].norms

    np.testing.assert_allclose(norm([[3.0, 3.0], [3.0, 3.0]], 6), math.sqrt(36 / 12), rtol=1e-6)


@pytest.mark.only("torch", "tensorflow", "jax")
@pytest.mark.parametrize(
    "rule", [uc.by_block_rms(1.0), uc.by_average_norm(0.5), uc.by_norm(0.5, axis=0)]
)
def test_sizes_of_sparse_gradients(framework: Framework, rule: Any) -> None:
    """Means are over all elements, absent rows included, as for the dense gradient."""
    rows, values = [0, 0, 2], [[1.0, 2.0], [2.0, 2.0], [-3.0, 8.0]]
    dense = framework.array([[3.0, 4.0], [0.0, 0.0], [-3.0, 8.0]])
    (found, report), (wanted, expected) = (
        uc.clip(grads, rule) for grads in (framework.sparse((3, 2), rows, values), dense)
    )
    np.testing.assert_allclose(framework.dense(found), framework.numpy(wanted), rtol=1e-6)
    for one, other in zip(leaves_of(report.norms), leaves_of(expected.norms), strict=True):
        np.testing.assert_allclose(framework.numpy(one), framework.numpy(other), rtol=1e-6)


@pytest.mark.needs("jax")
def test_a_node_of_jax_is_planned_once() -> None:
    """The structure of a tree is cached, also if only JAX opens it.

    Trees with arrays as static data are not cached.
    """
    import jax
    import jax.numpy as jnp

    node = jax.tree_util.register_dataclass(
        dataclasses.make_dataclass("Kept", ["w", "b", "static"]), ["w", "b"], ["static"]
    )
    for static, times in (("fixed", 2), (np.ones(2), 6)):
        seen = []
        rule = uc.by_group_norm(
            {"w": 1.0, "b": 2.0}, lambda path, leaf, seen=seen: seen.append(path) or path[-1]
        )
        for number in (1.0, 2.0, 3.0):
            clipped, report = uc.clip(
                [node(jnp.asarray([3.0 * number]), jnp.asarray([number]), copy(static))], rule
            )
        assert len(seen) == times
        assert (str(clipped[0].static), float(report.norms["w"])) == (str(static), 9.0)


@pytest.mark.needs("jax")
def test_a_class_that_is_registered_later() -> None:
    """A class that is registered with JAX after its first use is opened by JAX from then on."""
    import jax
    import jax.numpy as jnp

    node = dataclasses.make_dataclass("Later", ["w", "static"])
    for _ in range(2):
        with pytest.raises(TypeError, match=r"grads\['static'\]"):
            uc.clip(node(jnp.ones(2), "text"), uc.by_norm(1.0))
    jax.tree_util.register_dataclass(node, ["w"], ["static"])
    assert uc.clip(node(jnp.ones(2), "text"), uc.by_norm(1.0))[0].static == "text"


@pytest.mark.needs("jax")
def test_batches_of_sparse_matrices() -> None:
    """Batches of sparse matrices store single elements, and have no norm along rows."""
    import jax.numpy as jnp
    from jax.experimental import sparse

    dense = jnp.asarray([[3.0, 0.0], [0.0, 4.0]])
    batch = sparse.BCOO.fromdense(dense, n_batch=1, nse=2)
    (clipped,), norm = uc.clip_by_global_norm([batch], 1.0)
    assert float(norm) == 5.0
    np.testing.assert_allclose(clipped.todense(), dense / 5, rtol=1e-6)
    with pytest.raises(TypeError, match=r"grads\[0\] is sparse"):
        uc.clip([batch], uc.by_norm(1.0, axis=0))


@pytest.mark.only("torch", "tensorflow", "jax")
def test_a_function_of_repeated_rows(framework: Framework) -> None:
    """A function gets each row once, also a function that does not map 0 to 0."""
    grads = framework.sparse((4, 1), [2, 0, 2], [[0.5], [3.0], [0.25]])
    for function in (lambda grad: grad + 1, uc.by_value(1.75, 4.0)):
        clipped = framework.dense(uc.clip([grads], function)[0][0])
        np.testing.assert_array_equal(
            clipped[[0, 2], 0], [4.0, 1.75] if callable(function) else [3.0, 1.75]
        )


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    "rule", [uc.by_global_norm(1.0), uc.by_norm(0.5), lambda grad: grad / 5, uc.agc(0.1)]
)
def test_embeddings_that_are_added(rule: Any) -> None:
    """Sparse gradients of summed embeddings share storage, and are clipped like dense ones."""
    import torch

    torch.manual_seed(0)
    words, places = (torch.nn.Embedding(n, 3, sparse=True) for n in (9, 4))
    for _ in range(2):
        (words(torch.tensor([1, 5, 1, 8])) + places(torch.tensor([0, 1, 2, 2]))).pow(
            2
        ).sum().backward()
        params = [words.weight, places.weight]
        dense = [param.grad.to_dense() for param in params]
        grads = [param.grad for param in params]
        wanted, _ = uc.clip(dense, rule, [param.detach() for param in params])
        clipped, _ = uc.clip(grads, rule, [param.detach() for param in params])
        uc.clip_(grads, rule, [param.detach() for param in params])
        for one, other, found in zip(wanted, clipped, grads, strict=True):
            torch.testing.assert_close(other.to_dense(), one)
            torch.testing.assert_close(found.to_dense(), one)
        words.zero_grad(), places.zero_grad()


@pytest.mark.needs("torch")
@pytest.mark.parametrize("clip", [uc.clip, uc.clip_])
def test_what_is_no_tensor_of_torch(clip: Any) -> None:
    """A class of PyTorch that is no tensor is refused by its path, in place too."""
    import torch

    with pytest.raises(TypeError, match=r"grads\['w'\] is a torch"):
        clip({"w": torch.nn.ParameterDict({"a": torch.ones(2)})}, uc.by_global_norm(1.0))


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    "rule", [uc.by_global_norm(0.5), uc.by_norm(0.2), uc.by_global_norm(0.5, nonfinite="zero")]
)
@pytest.mark.parametrize("ids", [[7], [7, 3, 7, 1]])
def test_sparse_gradients_that_share_memory(rule: Any, ids: list[int]) -> None:
    """Each embedding of a sum may be clipped alone, or with the other one.

    A gradient may come twice, as another tensor.
    """
    import torch

    def gradients() -> list[Any]:
        torch.manual_seed(0)
        users, items = (torch.nn.Embedding(n, 3, sparse=True) for n in (10, 6))
        out = users(torch.tensor(ids)) + items(torch.arange(len(ids)))
        (out * torch.randn(len(ids), 3)).sum().backward()
        return [users.weight.grad, items.weight.grad]

    wanted, _ = uc.clip([grad.to_dense() for grad in gradients()], rule)
    grads = gradients()
    uc.clip_(grads, rule)
    for grad, one in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.to_dense(), one)
    first, _ = gradients()
    alone, _ = uc.clip([first.to_dense()], rule)
    uc.clip_([first], rule)
    torch.testing.assert_close(first.to_dense(), alone[0])
    first, _ = gradients()
    twice, _ = uc.clip([first.to_dense()] * 2, rule)
    uc.clip_([first, first.detach()], rule)
    torch.testing.assert_close(first.to_dense(), twice[0])
