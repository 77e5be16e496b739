#!/usr/bin/env bash
# Builds, checks and measures the kernels on one GPU, and fails after 8 minutes. On compute capability 9.0 it also fails
# if the mosaic kernels were not checked. From the root of the repository:
#
#   bash bench/gpu_kernels.sh          PYTHON=... another interpreter than .venv/bin/python; OUT=... where results go
#   DRY_RUN=1 bash bench/gpu_kernels.sh   the same steps at small shapes, on a CPU (the default where there is no GPU)
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python} OUT=${OUT:-runs/gpu_kernels}
command -v "$PYTHON" >/dev/null || { echo "no $PYTHON: make setup EXTRAS=dev,bench,gpu first, or give PYTHON=" >&2; exit 1; }
mkdir -p "$OUT"
export PYTHONPATH=.:kernels XLA_PYTHON_CLIENT_PREALLOCATE=false
DEADLINE=480 # seconds since the start, which bash counts in SECONDS

step() {
  local left=$((DEADLINE - SECONDS)) status=0
  if [ "$left" -lt 1 ]; then echo "no time is left of $DEADLINE s for: $*" >&2; exit 124; fi
  timeout --kill-after=5 "$left" "$@" || status=$?
  if [ "$status" = 124 ] || [ "$status" = 137 ]; then echo "out of time after $SECONDS s: $*" >&2; fi
  return "$status"
}
bench() { echo "== bench $*"; step "$PYTHON" -m rlx_kernels.bench "$@"; }

BACKEND=$(step "$PYTHON" -c 'import jax; print(jax.default_backend())')
if [ "$BACKEND" != gpu ] && [ -z "${DRY_RUN:-}" ]; then echo "no GPU (the backend is $BACKEND): a dry run"; DRY_RUN=1; fi
echo "== $(step "$PYTHON" -c 'import jax; print("jax", jax.__version__, jax.devices()[0].device_kind)')"

if [ -n "${DRY_RUN:-}" ]; then
  SHAPE=512,64,4096 DTYPE=float32 RATE=512 ROUNDS=2
else
  SHAPE=16384,4096,151936 DTYPE=bfloat16 RATE=8192 ROUNDS=5
fi

# 1. every implementation against the dense definition: on a GPU the kernels themselves, not the interpreter
echo "== every implementation against the dense definition"
step "$PYTHON" - "$BACKEND" <<'PY'
import sys
import jax, jax.numpy as jnp, numpy as np
from rlx_kernels.logprob import token_stats
from rlx_kernels.logprob.api import IMPLEMENTATIONS, unsupported_reason

rng = np.random.default_rng(0)
checked, missed = [], []
for tokens, vocab in ((1, 7), (300, 700), (513, 4099)):
    hidden = jnp.asarray(rng.normal(size=(tokens, 128)), jnp.bfloat16)
    head = jnp.asarray(rng.normal(size=(vocab, 128)) / 11, jnp.bfloat16)
    ids = jnp.asarray(rng.integers(0, vocab, (tokens, 5)), jnp.int32)

    def loss(name, hidden, head):
        out = token_stats(hidden, head, ids[:, 0], ids[:, 1:], implementation=name)
        return (out.logprob + out.entropy + out.logsumexp).sum() + out.candidate_logprobs.sum(), out

    run = lambda name, *x: jax.jit(jax.value_and_grad(lambda *y: loss(name, *y), (0, 1), has_aux=True))(*x)
    wanted = run("reference", hidden.astype(jnp.float32), head.astype(jnp.float32))
    for implementation in IMPLEMENTATIONS:
        reason = unsupported_reason(implementation.name, hidden, head, ids[:, 0], ids[:, 1:])
        if reason:
            missed.append(implementation.name)
            print(f"{implementation.name} is not checked at {tokens} x {vocab}: {reason}")
            continue
        checked.append(implementation.name)
        got = run(implementation.name, hidden, head)
        for part, tolerance in ((lambda r: r[0], 1e-4), (lambda r: r[1], 2e-2)):
            for x, y in zip(jax.tree.leaves(part(got)), jax.tree.leaves(part(wanted)), strict=True):
                x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
                np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max(), err_msg=implementation.name)
print("agree:", ", ".join(sorted(set(checked))), "on", sys.argv[1])
capability = jax.devices()[0].compute_capability if sys.argv[1] == "gpu" else None
if "mosaic" in missed or "mosaic" not in checked:
    if capability == "9.0":
        sys.exit("FAILED: this GPU has compute capability 9.0, and the mosaic kernels were not checked on it")
    print(f"mosaic was not checked: it needs a GPU of compute capability 9.0, this {sys.argv[1]} has {capability}")
PY

# 2. the log-prob head, forwards, both passes with a frozen and a trained head, beside dense XLA and the peers
for passes in forward frozen backward; do
  bench --families logprob --shapes "$SHAPE" --dtype "$DTYPE" --passes "$passes" --rate-size "$RATE" --rounds "$ROUNDS" \
    --candidates 16 --json "$OUT/logprob_$passes.json"
done

# 3. the other kernels
bench --families attention grouped_matmul --dtype "$DTYPE" --rate-size "$RATE" --rounds "$ROUNDS" --json "$OUT/others.json"
echo "== results in $OUT"
