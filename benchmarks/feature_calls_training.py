# SPDX-License-Identifier: MIT
"""The questions on arrays and training, of the table of features; see ``feature_calls_rules.py``."""

from __future__ import annotations

from typing import Any

from feature_calls_rules import CLIPPED, NOISE_FREE

SGD = "keras.optimizers.SGD(1.0, global_clipnorm=1.0)"
SHARDED = {
    "uniclip": "import uniclip as uc; uc.clip_(grads, uc.by_global_norm(6.5))",
    "PyTorch": "torch.nn.utils.clip_grad_norm_(params, 6.5)",
    "TensorFlow": "tf.clip_by_global_norm(grads, 6.5)[0][0]",
    "Keras": "keras.optimizers.SGD(1.0, global_clipnorm=6.5).apply(grads, weights); -weights[0].value",
    "optax": "jax.jit(lambda g: optax.clip_by_global_norm(6.5).update(g, optax.EmptyState())[0])(grads)[0]",
    "MLX": "nn.utils.clip_grad_norm_sharded(grads, 6.5)[0][0]",
    "timm": "dispatch_clip_grad(params, 6.5)",
    "smartclip": "smartclip.apply(model, smartclip.AGC(clipping=6.5e8, exclude_bias_bn=False))",
    "deepmd-kit": "clip_grad_norm_(params, 6.5, stable=False)",
}
"""Run by ``sharded.py``, in processes of their own; of Keras, on JAX."""

ARRAYS: dict[str, Any] = {
    "Finite gradients of 1e30": "A finite gradient of 1e30",
    "Gradients of 1e-30": "A gradient of 1e-30 above its limit",
    "bfloat16, measured in float32": "The norm of 500 bfloat16 tensors after clipping",
    "float16 beside float32": "float16 and float32 in one model",
    "No change exactly at the limit": "A gradient exactly at its limit",
    "Refuses a negative limit": "A negative limit",
    "Derivative through the clip": "Where the gradient is clipped",
    "… where the gradient is 0": "Where the gradient is 0",
    "Sparse, with a row that occurs twice": "A row that occurs twice",
    "Complex numbers": "Complex numbers",
    "Parameters without a gradient (None)": {
        "wanted": CLIPPED,
        "refuses": {"MLX": "'NoneType' object has no attribute 'dtype'"},
        "calls": {
            "uniclip": "uc.clip_by_global_norm([*grads, None], 1.0)[0][:1]",
            "PyTorch": (
                "unused = torch.nn.Parameter(torch.zeros(2)); "
                "torch.nn.utils.clip_grad_norm_([*params, unused], 1.0); params[0].grad"
            ),
            "TensorFlow": "tf.clip_by_global_norm([*grads, None], 1.0)[0][:1]",
            "Keras": f"{SGD}.apply([*grads, None], [*weights, keras.Variable([0.0])]); -weights[0].value",
            "optax": "optax.clip_by_global_norm(1.0).update([*grads, None], optax.EmptyState())[0][:1]",
            "MLX": "optim.clip_grad_norm([*grads, None], 1.0)[0][:1]",
            "timm": (
                "unused = torch.nn.Parameter(torch.zeros(2)); "
                "dispatch_clip_grad([*params, unused], 1.0); params[0].grad"
            ),
            "smartclip": (
                "model.append(torch.nn.Parameter(torch.zeros(2))); "
                "agc = smartclip.AGC(clipping=1e8, exclude_bias_bn=False); smartclip.apply(model, agc); params[0].grad"
            ),
            "deepmd-kit": (
                "unused = torch.nn.Parameter(torch.zeros(2)); clip_grad_norm_([*params, unused], 1.0); params[0].grad"
            ),
        },
    },
    "Nested dicts and lists": {
        "wanted": CLIPPED,
        "calls": {
            "uniclip": 'uc.clip_by_global_norm({"a": [{"b": grads[0]}]}, 1.0)[0]["a"][0]["b"]',
            "optax": (
                'optax.clip_by_global_norm(1.0).update({"a": [{"b": grads[0]}]}, optax.EmptyState())[0]["a"][0]["b"]'
            ),
            "MLX": 'optim.clip_grad_norm({"a": [{"b": grads[0]}]}, 1.0)[0]["a"][0]["b"]',
        },
    },
    "Leaves its arguments as they are": {
        "wanted": [[3.0, 4.0]],
        "calls": {
            "uniclip": "uc.clip_by_global_norm(grads, 1.0); grads",
            "TensorFlow": "tf.clip_by_global_norm(grads, 1.0); grads",
            "Keras": f"{SGD}.apply(grads, weights); grads",
            "optax": "optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState()); grads",
            "MLX": "optim.clip_grad_norm(grads, 1.0); grads",
        },
    },
    "In place": {
        "wanted": CLIPPED,
        "calls": {
            "uniclip": "uc.clip_(grads, uc.by_global_norm(1.0)); grads",
            "PyTorch": "torch.nn.utils.clip_grad_norm_(params, 1.0); grads",
            "timm": "dispatch_clip_grad(params, 1.0); grads",
            "smartclip": (
                "agc = smartclip.AGC(clipping=1e8, exclude_bias_bn=False); smartclip.apply(model, agc); grads"
            ),
            "deepmd-kit": "clip_grad_norm_(params, 1.0); grads",
        },
    },
    "In compiled code": {
        "wanted": CLIPPED,
        "calls": {
            "uniclip": (
                "import jax; jax.jit(lambda g: uc.clip_by_global_norm(g, 1.0)[0])([*map(jax.numpy.asarray, grads)])"
            ),
            "PyTorch": (
                "compiled = torch.compile(torch.nn.utils.clip_grad_norm_, backend='aot_eager'); "
                "compiled(params, 1.0); params[0].grad"
            ),
            "TensorFlow": "tf.function(lambda g: tf.clip_by_global_norm(g, 1.0)[0], autograph=False)(grads)",
            "Keras": (
                f"import tensorflow as tf; sgd = {SGD}; sgd.build(weights); "
                "tf.function(lambda g: sgd.apply(g, weights), autograph=False)(grads); -weights[0].value"
            ),
            "optax": "jax.jit(lambda g: optax.clip_by_global_norm(1.0).update(g, optax.EmptyState())[0])(grads)",
            "MLX": "mx.compile(lambda g: optim.clip_grad_norm(g, 1.0)[0])(grads)",
            "Opacus": (
                "params[0].grad_sample = torch.tensor([[3.0, 4.0]]); "
                f"dp = DPOptimizer({NOISE_FREE}, loss_reduction='sum'); "
                "torch.compile(dp.pre_step, backend='aot_eager')(); params[0].grad"
            ),
            "timm": (
                "compiled = torch.compile(dispatch_clip_grad, backend='aot_eager'); "
                "compiled(params, 1.0); params[0].grad"
            ),
            "smartclip": (
                "agc = smartclip.AGC(clipping=1e8, exclude_bias_bn=False); "
                "compiled = torch.compile(smartclip.apply, backend='aot_eager'); "
                "compiled(model, agc); params[0].grad"
            ),
            "deepmd-kit": (
                "compiled = torch.compile(clip_grad_norm_, backend='aot_eager'); compiled(params, 1.0); params[0].grad"
            ),
        },
    },
    "Sharded over two devices": {"wanted": None, "calls": SHARDED},
    "NumPy arrays in and out": {
        "calls": {"uniclip": "import numpy as np; isinstance(uc.clip_by_global_norm(grads, 1.0)[0][0], np.ndarray)"},
    },
}

TRAINING: dict[str, Any] = {
    "Clips inside the optimizer's step": {
        "wanted": [[-0.6, -0.8]],
        "calls": {
            "uniclip": (
                "import torch; from uniclip.integrations.torch import attach; "
                "w = torch.zeros(2, requires_grad=True); w.grad = torch.tensor([3.0, 4.0]); "
                "sgd = torch.optim.SGD([w], 1.0); attach(sgd, uc.by_global_norm(1.0)); sgd.step(); w.detach().numpy()"
            ),
            "Keras": f"{SGD}.apply(grads, weights); weights[0].value",
            "optax": (
                "tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)); tx.update(grads, tx.init(grads))[0]"
            ),
            "Opacus": (
                f"params[0].grad_sample = torch.tensor([[3.0, 4.0]]); "
                f"DPOptimizer({NOISE_FREE}, loss_reduction='sum').step(); params[0]"
            ),
            "smartclip": (
                "sgd = torch.optim.SGD(params, 1.0); agc = smartclip.AGC(clipping=1e8, exclude_bias_bn=False)\n"
                "with smartclip.clip_context(model, sgd, agc): sgd.step()\n"
                "params[0]"
            ),
        },
    },
    "Saves what a learned limit remembers": {
        "calls": {
            "uniclip": (
                "import json; clipper, resumed = (uc.Clipper(uc.autoclip(50)) for _ in range(2)); "
                "[clipper(grads) for _ in range(99)]; text = json.dumps(clipper.state_dict()); "
                "resumed.load_state_dict(json.loads(text)); spike = [100 * grads[0]]; out = resumed(spike)[0]; "
                "bool((out == clipper(spike)[0]).all()) and float(uc.global_norm([out])) < 400"
            ),
            "smartclip": (
                "import io; clipper, resumed = "
                "(smartclip.AutoClip(warmup_steps=0, min_history=5) for _ in range(2)); "
                "[smartclip.apply(model, clipper) for _ in range(99)]; file = io.BytesIO(); "
                "torch.save(clipper.state_dict(), file); file.seek(0); resumed.load_state_dict(torch.load(file)); "
                "grad = params[0].grad = 100 * grads[0]; smartclip.apply(model, resumed); out = grad.clone(); "
                "grad.copy_(100 * grads[0]); smartclip.apply(model, clipper); "
                "bool((out == grad).all()) and float(out.norm()) < 400"
            ),
        },
    },
    "Records a run and suggests a limit": {
        "calls": {
            "uniclip": (
                "import pathlib, tempfile; from uniclip import insight; "
                "rule, path = uc.by_global_norm(1.0), pathlib.Path(tempfile.mkdtemp(), 'run.jsonl')\n"
                "with insight.Recorder(path, rule=rule) as record:\n"
                "    for step in range(500): record(uc.clip(grads, rule)[1], loss=1 / (1 + step))\n"
                "record = insight.read(path)\n"
                "record.norms.tolist() == [5.0] * 500 and insight.suggest(record).limits[1] == 5.0"
            ),
        },
    },
    "Computes each example's gradient": {
        "calls": {
            "Opacus": (
                "net = opacus.GradSampleModule(torch.nn.Linear(1, 1)); net(torch.ones(3, 1)).sum().backward(); "
                "net._module.weight.grad_sample.shape == (3, 1, 1)"
            ),
        },
    },
    "… or only its norm (ghost clipping)": {
        "calls": {
            "Opacus": (
                "from opacus.grad_sample import GradSampleModuleFastGradientClipping as Ghost; "
                "net = Ghost(torch.nn.Linear(1, 1), max_grad_norm=1.0, use_ghost_clipping=True); "
                "net(torch.ones(3, 1)).sum().backward(); net.get_norm_sample().shape == (3,)"
            ),
        },
    },
    "Adds noise for differential privacy": {
        "calls": {
            "optax": (
                "tx = optax.contrib.differentially_private_aggregate(1.0, 1.0, seed=0); "
                "examples = [g[None] for g in grads]; "
                "bool(jnp.any(jnp.abs(tx.update(examples, tx.init(grads))[0][0] - jnp.array([0.6, 0.8])) > 1e-3))"
            ),
            "Opacus": (
                f"params[0].grad_sample = torch.tensor([[3.0, 4.0]]); "
                f"DPOptimizer({NOISE_FREE.replace('0.0', '1.0')}, loss_reduction='sum').pre_step(); "
                "bool((params[0].grad - torch.tensor([0.6, 0.8])).abs().max() > 1e-3)"
            ),
        },
    },
    "Counts the privacy that was spent": {
        "calls": {
            "Opacus": (
                "accountant = opacus.accountants.RDPAccountant(); "
                "accountant.step(noise_multiplier=1.0, sample_rate=0.1); accountant.get_epsilon(1e-5) > 0"
            ),
        },
    },
}
