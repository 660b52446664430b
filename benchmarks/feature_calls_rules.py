# SPDX-License-Identifier: MIT
"""The questions on rules and what comes back, of the table of features, and the lines that answer them in each library.

``grads`` are the gradients; ``params`` are parameters that have them as ``.grad``, ``model`` is a module of these
(PyTorch and what builds on it), ``weights`` are Keras variables. The last line has to return what is wanted.
"""

from __future__ import annotations

import math
from typing import Any

NOISE_FREE = "torch.optim.SGD(params, 1.0), noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=1"
SAMPLES = "params[0].grad_sample = torch.ones(4, 2) * 3"
CLIPPED = [[0.6, 0.8]]
RULES: dict[str, Any] = {
    "Each entry, between -c and c": {
        "case": "An ordinary gradient, clipped by value",
        "calls": {"MLX": "[mx.clip(g, -1.0, 1.0) for g in grads]"},
    },
    "Each entry, between two bounds": {
        "grads": [[3.0, -3.0]],
        "wanted": [[1.0, -2.0]],
        "calls": {
            "uniclip": "uc.clip_by_value(grads, -2.0, 1.0)",
            "PyTorch": "[torch.clamp(g, -2.0, 1.0) for g in grads]",
            "TensorFlow": "[tf.clip_by_value(g, -2.0, 1.0) for g in grads]",
            "Keras": "[keras.ops.clip(g, -2.0, 1.0) for g in grads]",
            "optax": "[jnp.clip(g, -2.0, 1.0) for g in grads]",
            "MLX": "[mx.clip(g, -2.0, 1.0) for g in grads]",
        },
    },
    "Bounds that differ from entry to entry": {
        "grads": [[3.0, 3.0]],
        "wanted": [[1.0, 2.0]],
        "calls": {
            "PyTorch": "most = torch.tensor([1.0, 2.0]); [torch.clamp(g, -most, most) for g in grads]",
            "TensorFlow": "[tf.clip_by_value(g, [-1.0, -2.0], [1.0, 2.0]) for g in grads]",
            "Keras": "[keras.ops.clip(g, [-1.0, -2.0], [1.0, 2.0]) for g in grads]",
            "optax": "most = jnp.array([1.0, 2.0]); [jnp.clip(g, -most, most) for g in grads]",
            "MLX": "most = mx.array([1.0, 2.0]); [mx.clip(g, -most, most) for g in grads]",
        },
    },
    "Each tensor by its norm": {
        "case": "An ordinary gradient, each tensor clipped by its norm",
        "calls": {
            "PyTorch": "[torch.nn.utils.clip_grad_norm_(p, 1.0) for p in params]; [p.grad for p in params]",
            "optax": "[optax.clip_by_global_norm(1.0).update(g, optax.EmptyState())[0] for g in grads]",
            "MLX": "[optim.clip_grad_norm(g, 1.0)[0] for g in grads]",
            "timm": "[dispatch_clip_grad(p, 1.0) for p in params]; [p.grad for p in params]",
            "deepmd-kit": "[clip_grad_norm_([p], 1.0) for p in params]; [p.grad for p in params]",
        },
    },
    "Each row by its norm": {
        "case": "An ordinary gradient, each row clipped by its norm",
        "calls": {"PyTorch": "[torch.renorm(g, 2, 0, 1.0) for g in grads]"},
    },
    "All tensors by their global norm": "An ordinary gradient, clipped by its global norm",
    "Another order of the norm, such as L1": {
        "grads": [[3.0, -4.0], [3.0]],
        "wanted": [[1.5, -2.0], [1.5]],
        "calls": {
            "uniclip": "uc.clip_by_global_norm(grads, 5.0, ord=1)[0]",
            "PyTorch": ("torch.nn.utils.clip_grad_norm_(params, 5.0, norm_type=1); [p.grad for p in params]"),
            "timm": "dispatch_clip_grad(params, 5.0, norm_type=1); [p.grad for p in params]",
        },
    },
    "Each tensor by its root mean square": "An ordinary gradient, each tensor clipped by its root mean square",
    "Relative to the parameter's norm": {
        "grads": [[6.0, 8.0]],
        "params": [[3.0, 4.0]],
        "wanted": [[0.3, 0.4]],
        "calls": {
            "uniclip": "uc.clip(grads, uc.agc(0.1), params=params)[0]",
            "optax": "optax.adaptive_grad_clip(0.1).update(grads, optax.EmptyState(), params)[0]",
            "timm": 'dispatch_clip_grad(params, 0.1, mode="agc"); params[0].grad',
            "smartclip": ("smartclip.apply(model, smartclip.AGC(clipping=0.1, exclude_bias_bn=False)); params[0].grad"),
        },
    },
    "… for each unit by itself (AGC)": {
        "grads": [[[6.0, 8.0], [0.1, 0.0]]],
        "params": [[[3.0, 4.0], [3.0, 4.0]]],
        "wanted": [[[0.3, 0.4], [0.1, 0.0]]],
        "calls": {
            "uniclip": "uc.clip(grads, uc.agc(0.1, axis=1), params=params)[0]",
            "optax": "optax.adaptive_grad_clip(0.1, axis=1).update(grads, optax.EmptyState(), params)[0]",
            "timm": 'dispatch_clip_grad(params, 0.1, mode="agc"); params[0].grad',
        },
    },
    "Groups, each with a limit, in one call": {
        "grads": [[3.0, 4.0], [0.0, 12.0]],
        "wanted": [[0.6, 0.8], [0.0, 6.0]],
        "calls": {
            "uniclip": "uc.clip(grads, uc.by_group_norm({0: 1.0, 1: 6.0}, lambda path, leaf: path[0]))[0]",
            "optax": (
                'limits = {"a": optax.clip_by_global_norm(1.0), "b": optax.clip_by_global_norm(6.0)}; '
                'tx = optax.partition(limits, ["a", "b"]); tx.update(grads, tx.init(grads))[0]'
            ),
        },
    },
    "Each example, before they are summed": "An ordinary gradient, the sum of clipped examples",
    "A limit learned from earlier norms": {
        "calls": {
            "uniclip": (
                "clipper = uc.Clipper(uc.autoclip(50)); [clipper(grads) for _ in range(99)]; "
                "float(uc.global_norm(clipper([100 * grads[0]]))) < 400"
            ),
            "Opacus": (
                f"{SAMPLES}; dp = AdaClipDPOptimizer({NOISE_FREE}, target_unclipped_quantile=0.5, "
                "clipbound_learning_rate=0.2, max_clipbound=10.0, min_clipbound=0.1, unclipped_num_std=1.0); "
                "dp.pre_step(); dp.max_grad_norm > 1.0"
            ),
            "smartclip": (
                "clipper = smartclip.AutoClip(warmup_steps=0, min_history=5); "
                "[smartclip.apply(model, clipper) for _ in range(99)]; params[0].grad.mul_(100); "
                "smartclip.apply(model, clipper); float(params[0].grad.norm()) < 400"
            ),
        },
    },
    "A limit on a schedule": {
        "wanted": [[0.3, 0.4]],
        "calls": {
            "uniclip": (
                "clipper = uc.Clipper(uc.by_global_norm(uc.limits.Schedule(lambda step: 1 / (1 + step)))); "
                "clipper(grads); clipper(grads)"
            ),
            "optax": (
                "tx = optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=lambda step: 1 / (1 + step)); "
                "state = tx.update(grads, tx.init(grads))[1]; tx.update(grads, state)[0]"
            ),
            "Opacus": (
                f"dp = DPOptimizer({NOISE_FREE}, loss_reduction='sum'); "
                "opacus.schedulers.ExponentialGradClip(dp, gamma=0.5).step(); "
                "params[0].grad_sample = torch.tensor([[3.0, 4.0]]); dp.pre_step(); params[0].grad"
            ),
        },
    },
}

BACK: dict[str, Any] = {
    "The norm before clipping": {
        "grads": [[3.0, 4.0], [12.0]],
        "wanted": [13.0],
        "calls": {
            "uniclip": "uc.clip_by_global_norm(grads, 1.0)[1]",
            "PyTorch": "torch.nn.utils.clip_grad_norm_(params, 1.0)",
            "TensorFlow": "tf.clip_by_global_norm(grads, 1.0)[1]",
            "optax": "optax.tree.norm(grads)",
            "MLX": "optim.clip_grad_norm(grads, 1.0)[1]",
            "smartclip": ("seen = []; smartclip.apply(model, smartclip.AutoClip(), seen.append); seen[0]['grad_norm']"),
            "deepmd-kit": "clip_grad_norm_(params, 1.0)",
        },
    },
    "Takes a norm that is known already": {
        "wanted": [[0.3, 0.4]],
        "calls": {
            "uniclip": "uc.clip_by_global_norm(grads, 1.0, norm=10.0)[0]",
            "PyTorch": "torch.nn.utils.clip_grads_with_norm_(params, 1.0, torch.tensor(10.0)); params[0].grad",
            "TensorFlow": "tf.clip_by_global_norm(grads, 1.0, use_norm=tf.constant(10.0))[0]",
        },
    },
    "Whether something was clipped": {
        "calls": {
            "uniclip": "bool(uc.clip(grads, uc.by_global_norm(1.0))[1].clipped)",
            "optax": "optax.per_example_global_norm_clip([g[None] for g in grads], 1.0)[1] == 1",
            "smartclip": (
                "seen = []; agc = smartclip.AGC(exclude_bias_bn=False); "
                "smartclip.apply(model, agc, seen.append); seen[0]['clipped']"
            ),
        },
    },
    "An error at NaN, where wanted": {
        "grads": [[math.nan, 4.0]],
        "wanted": "NaN|non-finite",
        "calls": {
            "uniclip": 'uc.clip(grads, uc.by_global_norm(1.0, nonfinite="raise"))',
            "PyTorch": "torch.nn.utils.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)",
            "TensorFlow": 'tf.debugging.check_numerics(grads[0], "grads[0]")',
            "optax": (
                "with jax.debug_nans(True): out = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())\nout"
            ),
            "deepmd-kit": (
                "guard = NonFiniteGradGuard(); guard.update(clip_grad_norm_(params, 1.0)); "
                'guard.raise_if_nonfinite(lambda: [("embedding", params[0])])'
            ),
        },
    },
    "… that names the parameter": {
        "grads": [[math.nan, 4.0]],
        "wanted": "embedding",
        "calls": {
            "uniclip": 'uc.clip({"embedding": grads[0]}, uc.by_global_norm(1.0, nonfinite="raise"))',
            "TensorFlow": 'tf.debugging.check_numerics(grads[0], "embedding")',
            "deepmd-kit": (
                "guard = NonFiniteGradGuard(); guard.update(clip_grad_norm_(params, 1.0)); "
                'guard.raise_if_nonfinite(lambda: [("embedding", params[0])])'
            ),
        },
    },
    "Skips a step with NaN": {
        "grads": [[math.nan, 4.0]],
        "wanted": [[0.0, 0.0]],
        "calls": {
            "uniclip": (
                "import torch; from uniclip.integrations.torch import attach; "
                "w = torch.zeros(2, requires_grad=True); w.grad = torch.from_numpy(grads[0]); "
                "sgd = torch.optim.SGD([w], 1.0); attach(sgd, uc.by_global_norm(1.0, nonfinite='skip')); "
                "sgd.step(); w.detach().numpy()"
            ),
            "PyTorch": (
                'scaler, sgd = torch.amp.GradScaler("cpu"), torch.optim.SGD(params, 1.0); '
                "scaler.scale(torch.ones(())); scaler.step(sgd); params[0]"
            ),
            "Keras": (
                "keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)).apply(grads, weights); weights[0].value"
            ),
            "optax": "tx = optax.apply_if_finite(optax.sgd(1.0), 9); tx.update(grads, tx.init(grads))[0]",
        },
    },
    "Takes NaN for 0, clips the rest": {
        "grads": [[math.nan, 3.0, 4.0]],
        "wanted": [[0.0, 0.6, 0.8]],
        "calls": {
            "uniclip": 'uc.clip(grads, uc.by_global_norm(1.0, nonfinite="zero"))[0]',
            "optax": (
                "tx = optax.chain(optax.zero_nans(), optax.clip_by_global_norm(1.0)); "
                "tx.update(grads, tx.init(grads))[0]"
            ),
        },
    },
}
