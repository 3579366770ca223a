#!/usr/bin/env python3
"""warmserve beside mlx_lm.server and vllm-mlx: the same models and requests, in one run.

    pip install '.[cpu]' && python -m venv /tmp/vllm && /tmp/vllm/bin/pip install vllm-mlx==0.6.0
    python .ci/compare.py MODEL [MODEL ...] --vllm-python /tmp/vllm/bin/python

Each server is started for each model, gets the system prompt as its warm prompt (mlx_lm.server,
which has none, as a first request), is measured and stopped. Then the model alone is measured,
without a server. A line is printed for every figure as it comes, and at last a table a model.

    +60 warm x 8        median TTFT in ms of 8 clients at once, each with the warm system prompt of
                        about 1,700 tokens and 60 of its own; TPOT; seconds until all have ended
    +60 cold x 8        the same with a system prompt that is new in every round
    gap                 the longest gap in a running stream while a cold prompt arrives: the median
                        of three streams, and their median step before it came
    behind 9k           TTFT of a warm request that comes 0.1 s after a cold one of 9,000 tokens
    bare                the forward passes over the suffix (of each prompt the best of three, for
                        kernels are planned in the first), without a server
    decode              median ms a step of mlx_lm's BatchGenerator (bare) and of warmserve's engine
                        in the same process, with prompts that are new to it or that it knows

A round of a cell is one request from every client at once. The first round does not count: every
server compiles kernels and grows buffers for what it sees first. User texts are new every time.
mlx_lm.server and vllm-mlx know no ignore_eos: compare totals only where all answers are as long.
"""

import argparse
import contextlib
import copy
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import warmserve as ws  # noqa: E402

SERVERS = ["warmserve", "mlx_lm.server", "vllm-mlx"]
BOOT_SECONDS = 400  # a first start compiles kernels
DECODE_STEPS = 96
Figure = tuple[str, float | None, str]  # its name, its value, and what else is to be told
rng = random.Random(time.time_ns())


def make_words(count: int) -> str:
    words = rng.choices(ws.WORDS.split(), k=count)
    return " ".join(word + "." * (i % 12 == 11) for i, word in enumerate(words))


def new_session(system: str) -> str:
    """A system prompt that no server has seen: another one from the first words on."""
    return f"Session {rng.getrandbits(64):016x}. {system}"


def make_body(target: ws.Target, system: str, num_words: int, max_tokens: int) -> bytes:
    messages = [{"role": "system", "content": system},
                {"role": "user", "content": make_words(num_words)}]
    return json.dumps({
        "model": target.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}).encode()


# -- servers --


def commands(args: argparse.Namespace, model: str, port: int, warm: str) -> dict[str, list[str]]:
    """How each server is started. Its environment is this one's, and what stands before it."""
    served = ["--model", model, "--port", str(port)]
    return {
        "warmserve": [sys.executable, str(args.warmserve), *served, "--warm-prompts", warm],
        "mlx_lm.server": [sys.executable, "-m", "mlx_lm", "server", *served],
        "vllm-mlx": [*args.vllm_python.split(), "-m", "vllm_mlx.cli", "serve", model,
                     "--port", str(port), "--continuous-batching", "--warm-prompts", warm],
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def server(args: argparse.Namespace, name: str, model: str) -> Iterator[ws.Target]:
    """A running server, ready and warm."""
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+") as log:
        warm, port = Path(folder) / "agents.json", free_port()
        warm.write_text(json.dumps([[{"role": "system", "content": args.system}]]))
        # vllm-mlx keeps stored prefixes in its home; downloaded models stay where they are.
        hub = os.environ.get("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
        home = {"HOME": folder, "HF_HOME": hub} if name == "vllm-mlx" else {}
        process = subprocess.Popen(
            commands(args, model, port, str(warm))[name], env={**os.environ, **home},
            stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            target = ws.Target(f"http://127.0.0.1:{port}", None)
            give_up = time.monotonic() + BOOT_SECONDS
            while not is_up(target):
                if time.monotonic() > give_up or process.poll() is not None:
                    raise ws.BenchError(f"did not start: {Path(log.name).read_text()[-500:]}")
                time.sleep(0.2)
            target.find_model(model if name == "mlx_lm.server" else None)
            for words in (5, 8):  # the second one leaves the system prompt in everybody's cache
                timing = ws.time_request(target, make_body(target, args.system, words, 4))
            if timing.error:
                raise ws.BenchError(timing.error)
            yield target
        finally:
            end(process)


def end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def is_up(target: ws.Target) -> bool:
    """Not loading any more: warmserve and vllm-mlx tell by /health, mlx_lm.server by its list."""
    return all(target.get(route).get("http_status") == 200 for route in ("/health", "/v1/models"))


# -- figures of a server --


def measure(args: argparse.Namespace, target: ws.Target) -> Iterator[Figure]:
    """All figures, as they come."""
    for suffix in args.suffixes:
        for mode in ("warm", "cold"):
            for clients in args.clients:
                yield from measure_cell(args, target, suffix, mode, clients)
    if args.streams:
        yield from measure_gap(args, target)
        yield from measure_behind(args, target)


def measure_cell(args: argparse.Namespace, target: ws.Target, suffix: int, mode: str,
                 clients: int) -> Iterator[Figure]:
    cell = ws.Cell("", target, "", clients)
    for number in range(-1, args.rounds):
        system = args.system if mode == "warm" else new_session(args.system)
        bodies = [make_body(target, system, round(suffix / 1.05), args.max_tokens)
                  for _ in range(clients)]
        round_ = ws.Cell("", target, "", clients) if number < 0 else cell
        round_.run_round(bodies)
    row, name = cell.row(), f"+{suffix} {mode} x {clients}"
    told = "cached {cached_tokens} of {prompt_tokens}, {completion_tokens} generated".format(**row)
    yield f"{name}: TTFT ms", row["ttft_ms"], "; ".join([told, *cell.failures()])
    yield f"{name}: TPOT ms", row["tpot_ms"], ""
    yield f"{name}: total s", round(cell.wall_s / args.rounds, 2), ""


def measure_gap(args: argparse.Namespace, target: ws.Target) -> Iterator[Figure]:
    """Three times: a stream runs, and after its 20th piece of text a cold prompt is sent."""
    steps, gaps, first = [], [], []
    for _ in range(3):
        cold, arrivals = [], []
        body = make_body(target, new_session(args.system), 50, 2)
        sender = threading.Thread(
            target=lambda body=body, out=cold: out.append(ws.time_request(target, body)))
        stream = make_body(target, "Be brief.", 20, 300)
        with target.open("/v1/chat/completions", stream, ws.REQUEST_TIMEOUT_S) as response:
            for arrival, event in ws.read_events(response):
                if event and any(map(ws.has_text, event.get("choices") or [])):
                    arrivals.append(arrival)
                    if len(arrivals) == 20:
                        sender.start()
        if len(arrivals) > 20:
            sender.join()
            between = [1e3 * (b - a) for a, b in itertools.pairwise(arrivals)]
            steps += between[5:19]
            gaps.append(max(between[19:]))
            first.append(cold[0].ttft_ms or 0.0)
    if gaps:
        told = f"the step before: {statistics.median(steps):.1f}; the cold prompt's TTFT {first}"
        yield "gap: longest ms", round(statistics.median(gaps), 1), told


def measure_behind(args: argparse.Namespace, target: ws.Target) -> Iterator[Figure]:
    times = []
    for _ in range(3):
        body = make_body(target, new_session(""), 8600, 2)
        cold = threading.Thread(target=ws.time_request, args=(target, body))
        cold.start()
        time.sleep(0.1)  # the figure is defined so
        times.append(ws.time_request(target, make_body(target, args.system, 57, 4)).ttft_ms)
        cold.join()
    yield "behind 9k: TTFT ms", ws.percentile(times, 50), str(times)


# -- the model without a server --


def in_engine(engine: ws.Engine, function: Callable[..., Any], *arguments: Any) -> Any:
    """function(engine, *arguments), called in the engine thread, where the model is."""
    out, done = [], threading.Event()

    def call() -> None:
        try:
            out.append(function(engine, *arguments))
        except Exception as error:
            out.append(error)
        done.set()

    engine.loop.call_soon_threadsafe(call)
    done.wait()
    if isinstance(out[0], Exception):
        raise out[0]
    return out[0]


def bare(model: str, args: argparse.Namespace) -> None:
    """In a process of its own. Prints (name, figure, value, more) as JSON lines."""
    engine = ws.Engine(lambda: ws.ModelRunner(model))
    engine.start()
    while engine.state == "loading":
        time.sleep(0.05)
    if engine.state != "ready":
        raise SystemExit(engine.error)

    def prompt(num_words: int) -> ws.Sequence:
        messages = [{"role": "system", "content": args.system},
                    {"role": "user", "content": make_words(num_words)}]
        params = ws.SamplingParams(max_tokens=DECODE_STEPS, ignore_eos=True)
        return engine.chat.sequence(messages, None, {}, params)

    def tell(name: str, figure: str, values: list[float]) -> None:
        value = round(statistics.median(values), 2)
        print(json.dumps([name, figure, value, str(values)]), flush=True)

    (length,) = prompt(5).boundaries
    system = in_engine(engine, bare_system, prompt(5).prompt_ids[:length])
    for suffix in args.suffixes:
        prompts = [prompt(round(suffix / 1.05)).prompt_ids for _ in range(4)]
        times = [in_engine(engine, bare_prefill, system, ids[length:]) for ids in prompts]
        tell("bare", f"+{suffix} warm x 1: TTFT ms", times)
    for rows in (1, 8):
        alone, cold, warm = [], [], []
        for _ in range(4):
            prompts = [prompt(60) for _ in range(rows)]
            again = [ws.Sequence(seq.prompt_ids, seq.params) for seq in prompts]
            suffixes = [seq.prompt_ids[length:] for seq in prompts]
            alone.append(in_engine(engine, bare_decode, system, suffixes))
            engine.clear().wait()
            cold.append(engine_decode(engine, prompts))
            warm.append(engine_decode(engine, again))
        for mode, ours in (("cold", cold), ("warm", warm)):  # the first time compiles kernels
            tell("bare", f"decode x {rows}, {mode}: ms", alone[1:])
            tell("warmserve", f"decode x {rows}, {mode}: ms", ours[1:])
    os._exit(0)


def bare_system(engine: ws.Engine, ids: list[int]) -> list[Any]:
    """The caches of the system prompt."""
    kv = engine.runner.new_kv()
    with ws.mx.stream(engine.runner.generator.stream):
        engine.runner.model(ws.mx.array([ids]), cache=kv)
        ws.mx.eval([c.state for c in kv])
    return kv


def bare_prefill(engine: ws.Engine, system: list[Any], suffix: list[int]) -> float:
    """ms from the caches of the system prompt to the first token, in the engine's chunks."""
    mx, runner, times = ws.mx, engine.runner, []
    with mx.stream(runner.generator.stream):
        for _ in range(3):
            kv, rest, started = copy.deepcopy(system), suffix, time.perf_counter()
            while len(rest) > engine.final_pass:
                size = min(engine.prefill_step_size, len(rest) - 1)
                part, rest = rest[:size], rest[size:]
                runner.model(mx.array([part]), cache=kv)
                mx.async_eval([c.state for c in kv])
            mx.eval(mx.argmax(runner.model(mx.array([rest]), cache=kv)[:, -1], -1))
            times.append(1e3 * (time.perf_counter() - started))
    return round(min(times), 1)


def bare_decode(engine: ws.Engine, system: list[Any], suffixes: list[list[int]]) -> float:
    """Median ms a step of mlx_lm's BatchGenerator with a row for each of these."""
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(engine.runner.model, completion_batch_size=64,
                               prefill_batch_size=64, max_tokens=DECODE_STEPS + 8)
    firsts, kvs = [], []
    for ids in suffixes:  # one by one: its own batched prefill takes more memory, and may fail
        kvs.append(copy.deepcopy(system))
        logits = engine.runner.model(ws.mx.array([ids]), cache=kvs[-1])[:, -1]
        firsts.append([ws.mx.argmax(logits, -1).item()])
    generator.insert(firsts, caches=kvs, all_tokens=suffixes,
                     stop_sequences=[engine.runner.no_stop] * len(suffixes))
    count, times = 0, []
    while count < 3 * len(suffixes):
        count += len(generator.next()[1])
    for _ in range(DECODE_STEPS - 8):
        started = time.perf_counter()
        generator.next()
        times.append(1e3 * (time.perf_counter() - started))
    return round(statistics.median(times), 2)


def engine_decode(engine: ws.Engine, seqs: list[ws.Sequence]) -> float:
    """Median ms a step of warmserve's engine while all of these are rows and nothing else is."""
    starts, step = [], engine.step

    def timed():
        if len(engine.rows) == len(seqs) and not (engine.waiting or engine.prefilling):
            starts.append(time.perf_counter())
        step()

    engine.step = timed
    for seq in seqs:
        engine.submit(seq)
    for seq in seqs:
        while not isinstance(seq.events.get(), ws.Done):
            pass
    engine.step = step
    steps = [b - a for a, b in itertools.pairwise(starts[3:])]
    return round(1e3 * statistics.median(steps), 2)


# -- all of it --


def compare(args: argparse.Namespace, model: str) -> tuple[dict[str, dict[str, float]], bool]:
    """{figure: {server: value}}, and whether all was measured."""
    table: dict[str, dict[str, float]] = {}
    complete = True

    def note(name: str, figure: str, value: float | None, told: str) -> None:
        print(f"{Path(model).name} | {name} | {figure} = {value}   {told}", flush=True)
        if value is not None:
            table.setdefault(figure, {})[name] = value

    for name in args.servers:
        try:
            with server(args, name, model) as target:
                for figure in measure(args, target):
                    note(name, *figure)
        except Exception as error:  # a server may break in any way; the others are measured
            complete = False
            print(f"{Path(model).name} | {name} | {ws.describe_error(error)}", flush=True)
    if args.bare:
        command = [sys.executable, __file__, *sys.argv[1:], "--only-bare", model]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                for line in process.stdout:
                    note(*json.loads(line))
            except BaseException:  # a signal, too
                process.kill()
                raise
        complete &= process.returncode == 0
    return table, complete


def render(model: str, table: dict[str, dict[str, float]], servers: list[str]) -> str:
    """A table, with warmserve's figures as parts of the better peer's and of the bare model's."""
    columns = [*servers, "bare"]
    heads = [Path(model).name, *columns, "of the better peer", "of bare"]
    lines = [heads, ["---"] * len(heads)]
    for figure, row in table.items():
        ours, peers = row.get(servers[0]), [row[s] for s in servers[1:] if s in row]
        ratios = [ws.ratio(ours, min(peers, default=None)), ws.ratio(ours, row.get("bare"))]
        cells = [row.get(column) for column in columns] + ratios
        lines.append([figure, *["" if cell is None else f"{cell:,}" for cell in cells]])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("models", nargs="+", metavar="MODEL", help="mlx-lm folder or Hub repo id")
    flag("--servers", type=lambda text: text.split(","), default=SERVERS, metavar="LIST",
         help=f"the first one is compared with the others ({','.join(SERVERS)})")
    flag("--clients", type=ws.int_list, default=[1, 4, 8], metavar="LIST")
    flag("--suffixes", type=ws.int_list, default=[60, 2500], metavar="LIST",
         help="tokens of a user's text (60,2500)")
    flag("--system-words", type=int, default=1560, metavar="N",
         help="of the system prompt; about as many tokens and a tenth more (%(default)s)")
    flag("--rounds", type=int, default=2, help="that count, per cell (%(default)s)")
    flag("--max-tokens", type=int, default=64, help="per answer (%(default)s)")
    flag("--vllm-python", default=sys.executable, metavar="PYTHON",
         help="the interpreter that has vllm-mlx; env and its settings may stand before it")
    flag("--warmserve", type=Path, default=HERE.parent / "warmserve.py", help=argparse.SUPPRESS)
    flag("--no-streams", dest="streams", action="store_false", help="no gap, no behind 9k")
    flag("--no-bare", dest="bare", action="store_false", help="servers only")
    flag("--only-bare", metavar="MODEL", help=argparse.SUPPRESS)  # bare() in its own process
    args = parser.parse_args()
    if unknown := {*args.servers} - {*SERVERS}:
        parser.error(f"--servers: no such server: {', '.join(unknown)}")
    args.system = "You are an assistant. " + make_words(args.system_words)
    if args.only_bare:
        bare(args.only_bare, args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end the server that is running
    code = 0
    for model in args.models:
        table, complete = compare(args, model)
        code |= not complete
        print("\n" + render(model, table, args.servers) + "\n", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
