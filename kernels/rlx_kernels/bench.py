"""What the kernels cost beside their peers, in one process: time, effective TFLOP/s, temporary memory, the floor.

    python -m rlx_kernels.bench [--families logprob attention ...] [--shapes 2048,256,32768] [--json FILE]

Every case of a family and shape runs once in each round, in turn; times are medians. Effective TFLOP/s counts the
products that nobody can avoid (recomputed ones are not counted); the floor is those at the rate of one plain product in
the same run. Temporary memory is XLA's, of the compiled program, without arguments and results. A case that runs out of
memory is a row that says so.
"""

import argparse
import functools
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlx_kernels.attention import attention
from rlx_kernels.delta_rule import delta_rule
from rlx_kernels.grouped_matmul import grouped_matmul
from rlx_kernels.logprob import api, token_loss, token_stats


class Case(NamedTuple):
    name: str
    function: Callable[..., Any]
    arguments: tuple
    flop: float  # that cannot be avoided


class Settings(NamedTuple):
    dtype: Any
    candidates: int
    passes: str  # forward, backward (both passes, every gradient), frozen (both passes, that of the first array only)


class Row(NamedTuple):
    family: str
    shape: tuple[int, ...]
    case: str
    seconds: float | None  # median; None: did not fit in memory
    fastest: float | None
    tflops: float | None
    floor_seconds: float
    temporary_bytes: int | None  # None: not compiled, or the backend does not say


Family = Callable[[tuple[int, ...], Settings], list[Case]]


def logprob_cases(shape: tuple[int, ...], settings: Settings) -> list[Case]:
    """Shape (T, D, V). A loss of log-prob, entropy and candidates; jax-cce and optax give a mean of log-probs only."""
    tokens, width, vocab = shape
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(tokens, width)), settings.dtype)
    head = jnp.asarray(rng.normal(size=(vocab, width)) / np.sqrt(width), settings.dtype)
    targets = jnp.asarray(rng.integers(0, vocab, tokens), jnp.int32)
    candidates = jnp.asarray(rng.integers(0, vocab, (tokens, settings.candidates)), jnp.int32)
    weights = jnp.asarray(rng.normal(size=(tokens, settings.candidates + 1)), jnp.float32)
    functions = _logprob_losses(hidden, head, targets, candidates) | _logprob_peers()
    products = {"forward": 1, "frozen": 2, "backward": 3}[settings.passes]
    arguments = hidden, head, targets, candidates, weights
    flop = 2.0 * products * tokens * width * vocab
    return [Case(name, differentiated(f, settings.passes, 2), arguments, flop) for name, f in functions.items()]


def per_token_loss(stats, weights):
    heads = (stats.candidate_logprobs * weights[:, 1:]).sum()
    return (stats.logprob * weights[:, 0]).sum() + 0.1 * stats.entropy.sum() + heads


def _logprob_losses(*arguments):
    def of_stats(implementation, hidden, head, targets, candidates, weights):
        return per_token_loss(token_stats(hidden, head, targets, candidates, implementation=implementation), weights)

    def forward_gradient(hidden, head, targets, candidates, weights):
        return token_loss(per_token_loss, hidden, head, targets, candidates, weights)[0]

    served = [i.name for i in api.IMPLEMENTATIONS if api.unsupported_reason(i.name, *arguments) is None]
    ours = {n: functools.partial(of_stats, n) for n in served if n != "reference"}
    dense = functools.partial(of_stats, "reference")
    return ours | {
        "xla, gradient in forward": forward_gradient,
        "dense": dense,
        "dense, recomputed": jax.checkpoint(dense),
    }


def _logprob_peers():
    """Those that are installed (`pip install .[bench]`)."""
    peers = {}
    if importlib.util.find_spec("jax_cce"):
        from jax_cce import linear_cross_entropy

        peers["jax-cce (mean loss only)"] = lambda hidden, head, targets, *_: linear_cross_entropy(
            hidden, head, targets
        )
    if importlib.util.find_spec("optax"):
        import optax

        def dense_optax(hidden, head, targets, *_):
            logits = jnp.dot(hidden, head.T, preferred_element_type=jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        peers["optax on dense logits (mean loss only)"] = dense_optax
    return peers


def attention_cases(shape: tuple[int, ...], settings: Settings) -> list[Case]:
    """Shape (T, H, G, C): one row of T tokens in 4 segments, H heads of width C, G of them for keys and values."""
    tokens, heads, kv_heads, width = shape
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.normal(size=(1, tokens, n, width)), settings.dtype) for n in (heads, kv_heads, kv_heads)
    )
    segment_ids = jnp.repeat(jnp.arange(1, 5, dtype=jnp.int32), -(-tokens // 4))[None, :tokens]
    positions = (jnp.arange(tokens, dtype=jnp.int32) % -(-tokens // 4))[None]

    def ours(query, key, value):
        return attention(query, key, value, positions=positions, segment_ids=segment_ids).astype(jnp.float32).sum()

    def dense(query, key, value):
        mask = (segment_ids[:, :, None] == segment_ids[:, None]) & (positions[:, :, None] >= positions[:, None])
        out = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None])
        return out.astype(jnp.float32).sum()

    products = {"forward": 2, "frozen": 4, "backward": 6}[settings.passes]  # frozen: dP and dQ, not dK and dV
    flop = 2.0 * products * heads * width * tokens * tokens / 8  # half of each of 4 squares
    cases = {"attention": ours, "dense mask": dense}
    return [Case(n, differentiated(f, settings.passes, 3), (query, key, value), flop) for n, f in cases.items()]


def grouped_matmul_cases(shape: tuple[int, ...], settings: Settings) -> list[Case]:
    """Shape (rows, D, F, E): the rows spread unevenly over E matrices [D, F]."""
    count, width, out, groups = shape
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(count, width)), settings.dtype)
    weights = jnp.asarray(rng.normal(size=(groups, width, out)) / np.sqrt(width), settings.dtype)
    sizes = jnp.asarray(rng.multinomial(count, rng.dirichlet(np.ones(groups))), jnp.int32)

    def ours(x, weights):
        return grouped_matmul(x, weights, sizes).astype(jnp.float32).sum()

    def every_expert(x, weights):
        member = jnp.repeat(jnp.arange(groups), sizes, total_repeat_length=count)[:, None] == jnp.arange(groups)
        return jnp.einsum("ne,nd,edf->nf", member.astype(x.dtype), x, weights).astype(jnp.float32).sum()

    products = {"forward": 1, "frozen": 2, "backward": 3}[settings.passes]
    cases = {"grouped_matmul": ours, "every row by every matrix": every_expert}
    flop = 2.0 * products * count * width * out
    return [Case(n, differentiated(f, settings.passes, 2), (x, weights), flop) for n, f in cases.items()]


def delta_rule_cases(shape: tuple[int, ...], settings: Settings, *, channels: bool = False) -> list[Case]:
    """Shape (T, H, K, V): one row of T tokens in 4 segments, H heads with states [K, V], a decay for each or, with
    `channels`, for each of its K channels."""
    tokens, heads, key_width, value_width = shape
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(1, tokens, heads, n)) for n in (key_width, key_width, value_width))
    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    decay = -np.abs(rng.normal(size=(1, tokens, heads, *((key_width,) if channels else ()))))
    arrays = (query, key, value, decay, rng.uniform(size=(1, tokens, heads)))
    segment_ids = jnp.repeat(jnp.arange(1, 5, dtype=jnp.int32), -(-tokens // 4))[None, :tokens]

    def by(implementation, *arguments):
        out = delta_rule(*arguments, segment_ids=segment_ids, implementation=implementation).output
        return out.astype(jnp.float32).sum()

    # of each token and head: the state by the key, key by update, the state by the query; nobody repeats them backwards
    flop = (
        2.0 * 3 * tokens * heads * key_width * value_width * {"forward": 1, "frozen": 2, "backward": 3}[settings.passes]
    )
    cases = {"delta_rule, chunked": "chunked", "delta_rule, token by token": "reference"}
    arguments = tuple(jnp.asarray(x, settings.dtype) for x in arrays)
    return [
        Case(n, differentiated(functools.partial(by, i), settings.passes, 5), arguments, flop) for n, i in cases.items()
    ]


FAMILIES: dict[str, tuple[Family, list[tuple[int, ...]]]] = {
    "logprob": (logprob_cases, [(2048, 256, 32768), (1024, 576, 49152)]),
    "attention": (attention_cases, [(1024, 9, 3, 64)]),
    "grouped_matmul": (grouped_matmul_cases, [(2048, 256, 512, 8)]),
    "delta_rule": (delta_rule_cases, [(2048, 8, 128, 128)]),
    "delta_rule_channels": (functools.partial(delta_rule_cases, channels=True), [(2048, 8, 128, 128)]),
}


def differentiated(function: Callable[..., Any], passes: str, trained: int) -> Callable[..., Any]:
    """In the first argument where the rest is frozen, else in the first `trained`."""
    if passes == "forward":
        return function
    return jax.value_and_grad(function, (0,) if passes == "frozen" else tuple(range(trained)))


def product_rate(dtype: Any, size: int) -> float:
    """FLOP/s of a square matrix product, the best of 9."""
    x = jnp.ones((size, size), dtype)
    run = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32)).lower(x).compile()
    jax.block_until_ready(run(x))
    return 2.0 * size**3 / min(_timed(run, (x,)) for _ in range(9))


def measure(family: str, shape: tuple[int, ...], settings: Settings, rounds: int, rate: float) -> list[Row]:
    """A row for every case: compiled first, one run of each left out, then `rounds` of all that fit in turn."""
    cases = FAMILIES[family][0](shape, settings)
    compiled = [_if_it_fits(_compile, c) for c in cases]
    fits = [run is not None and _if_it_fits(_timed, run, c.arguments) is not None for run, c in zip(compiled, cases)]
    seconds: list[list[float | None]] = [[] for _ in cases]
    for _ in range(rounds):
        for case, run, fit, times in zip(cases, compiled, fits, seconds):
            if fit:
                times.append(_if_it_fits(_timed, run, case.arguments))
    return [_row(family, shape, *of_case, rate) for of_case in zip(cases, compiled, seconds)]


def _row(family, shape, case, run, times, rate) -> Row:
    floor = case.flop / rate
    memory = None if run is None else run.memory_analysis()
    temporary_bytes = None if memory is None else memory.temp_size_in_bytes
    if not times or None in times:
        return Row(family, shape, case.name, None, None, None, floor, temporary_bytes)
    median = statistics.median(times)
    return Row(family, shape, case.name, median, min(times), case.flop / median / 1e12, floor, temporary_bytes)


def _if_it_fits(function, *arguments):
    """None where it runs out of memory, compiling or running."""
    try:
        return function(*arguments)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


def _compile(case):
    return jax.jit(case.function).lower(*case.arguments).compile()


def _timed(run, arguments) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    return time.perf_counter() - start


def table(rows: list[Row]) -> str:
    """Markdown, each case as a multiple of the first of its family and shape."""
    lines = ["| | ms | of the first | TFLOP/s | of the floor | temporary MiB |", "|:--|--:|--:|--:|--:|--:|"]
    first = rows[0]
    for row in rows:
        if (row.family, row.shape) != (first.family, first.shape) or row is rows[0]:
            first = row
            lines.append(f"| **{row.family} {' × '.join(map(str, row.shape))}** | | | | | |")
        lines.append(f"| {row.case} | {_figures(row, first)} |")
    return "\n".join(lines)


def _figures(row: Row, first: Row) -> str:
    memory = "" if row.temporary_bytes is None else f"{row.temporary_bytes / 2**20:,.0f}"
    if row.seconds is None:
        return f"did not fit | | | | {memory}"
    of_first = "" if first.seconds is None else f"{row.seconds / first.seconds:.2f}"
    floor = f"{row.floor_seconds / row.seconds:.0%}"
    return f"{1e3 * row.seconds:,.1f} | {of_first} | {row.tflops:.3g} | {floor} | {memory}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="rlx_kernels.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--shapes", nargs="+", type=_shape, help="of one family; T,D,V of logprob")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--passes", choices=["forward", "frozen", "backward"], default="backward")
    parser.add_argument("--candidates", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate-size", type=int, default=2048, help="of the square product that gives the floor's rate")
    parser.add_argument("--json", type=Path, help="also writes the rows there, as they come")
    given = parser.parse_args(arguments)
    if given.shapes and len(given.families) != 1:
        parser.error(f"--shapes are those of one family; name it: --families {given.families[0]}")
    settings = Settings(jnp.dtype(given.dtype), given.candidates, given.passes)
    device = jax.devices()[0].device_kind
    rate = product_rate(settings.dtype, given.rate_size)
    head = {"jax": jax.__version__, "device": device, "dtype": given.dtype, "passes": given.passes, "rate": rate}
    print(f"jax {jax.__version__} on {device}, {given.dtype}, {given.passes}, product {rate / 1e12:.3g} TFLOP/s")
    rows: list[Row] = []
    for family in given.families:
        for shape in given.shapes or FAMILIES[family][1]:
            rows += measure(family, shape, settings, given.rounds, rate)
            if given.json:  # each time: a later shape may fail
                given.json.write_text(json.dumps(head | {"rows": [row._asdict() for row in rows]}, indent=1))
    print(table(rows))


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


if __name__ == "__main__":
    main()
