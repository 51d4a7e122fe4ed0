"""The ledger: what the server saw is what the turns hold, for any sampled tokens, and limits end it on
sampled tokens."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace

import hypothesis.strategies as st
import numpy as np
import pytest
from chat_messages import assistant, tool, user
from hypothesis import HealthCheck, given, settings

from turnwise.batching.samples import build_samples
from turnwise.chat.conversation import TextAnswer, TextConversation, TokenConversation
from turnwise.chat.template import ChatTemplate
from turnwise.errors import ChatTemplateError, RolloutError, ServerError
from turnwise.models.tokenizer import CHAT_TEMPLATE
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.types import (
    CallOptions,
    Completion,
    Media,
    SamplingParams,
    Task,
    Trajectory,
    VersionRun,
    derive_seed,
)

PROPERTY = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
SAMPLING = SamplingParams(max_new_tokens=32, seed=11)


def open_conversation(template, server, max_length=4096, sampling=SAMPLING, **kwargs):
    return TokenConversation(template, server, "episode-0", sampling, max_length, **kwargs)


def play(conversation, texts, max_new_tokens=None):
    async def run():
        return [await conversation.generate([user(text)], CallOptions(max_new_tokens)) for text in texts]

    return asyncio.run(run())


@PROPERTY
@given(data=st.data())
def test_the_server_sees_the_turns_concatenated_for_any_sampled_tokens(template, data):
    """Any ids: byte sequences that are no UTF-8, texts split where merging would join them, special tokens in
    the middle."""
    token_ids = st.integers(0, len(template.tokenizer) - 1)
    responses = data.draw(st.lists(st.lists(token_ids, max_size=40), min_size=1, max_size=4))
    texts = data.draw(st.lists(st.text(max_size=15), min_size=len(responses), max_size=len(responses)))
    server = ScriptedServer(responses)
    conversation = open_conversation(template, server)
    play(conversation, texts)

    seen: list[int] = []
    for turn, request, scripted in zip(conversation.turns, server.requests, responses, strict=True):
        assert list(request.prompt_ids[: len(seen)]) == seen
        seen += [*turn.prompt_ids, *turn.response_ids]
        assert list(request.prompt_ids) == seen[: len(seen) - len(turn.response_ids)]
        assert turn.response_ids.tolist() == scripted[: len(turn.response_ids)]
        assert len(turn.logprobs) == len(turn.response_ids) <= 32
    conversation.verify()
    assert conversation.remaining_tokens() == 4096 - len(seen)


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_tokens_that_do_not_survive_encoding_stay_as_they_were_sampled(template):
    tokenizer = template.tokenizer
    split = [tokenizer.convert_tokens_to_ids(letter) for letter in "Right"]
    reencoded = tokenizer.encode("Right", add_special_tokens=False)
    broken = [tokenizer.convert_tokens_to_ids(symbol) for symbol in "âĺ"]  # the first two bytes of ☃
    conversation = open_conversation(template, ScriptedServer([split, broken]))
    answers = play(conversation, ["where?", "and now?"])
    assert [turn.response_ids.tolist() for turn in conversation.turns] == [split, broken]
    assert answers[0]["content"] == "Right" and (reencoded != split or len(tokenizer) == 256 + 3)
    assert tokenizer.encode(answers[1]["content"], add_special_tokens=False) != broken


def test_turns_record_the_response_and_leave_the_stop_token_out_of_the_text(chatml):
    server = ScriptedServer(
        [chatml.respond("<answer>Right</answer>"), chatml.respond("Left")[:-1]], version=3
    )
    conversation = open_conversation(chatml, server, parent=4)
    answers = play(conversation, ["P _\n_ G", "_ P\n_ G"])
    first, second = conversation.turns
    assert answers[0] == assistant("<answer>Right</answer>")
    assert (first.text, first.finish_reason, first.observation) == (
        "<answer>Right</answer>",
        "stop",
        "P _\n_ G",
    )
    assert first.messages == [user("P _\n_ G"), answers[0]] and second.messages[-1] == answers[1]
    assert first.response_ids[-1] == chatml.stop_token_ids[0]
    assert (first.starts_context, first.parent) == (True, 4) and (second.starts_context, second.parent) == (
        False,
        None,
    )
    assert (second.text, second.finish_reason) == ("Left", "length")
    assert first.versions == (VersionRun(3, len(first.response_ids)),) and not first.is_greedy


def test_each_turn_has_its_own_seed_and_the_template_s_stop_tokens(chatml):
    server = ScriptedServer(lambda request: chatml.respond("x"))
    play(open_conversation(chatml, server, sampling=replace(SAMPLING, stop_token_ids=(5,))), "abc")
    assert [request.sampling.seed for request in server.requests] == [
        derive_seed(11, turn) for turn in range(3)
    ]
    assert {request.sampling.stop_token_ids for request in server.requests} == {(5, *chatml.stop_token_ids)}
    assert {request.request_id for request in server.requests} == {"episode-0"}


def test_the_budget_is_the_smallest_of_what_is_asked_allowed_and_left(chatml):
    server = ScriptedServer(lambda request: [65] * 100)
    prompt = len(chatml.start([user("hi")]))
    play(open_conversation(chatml, server), ["hi"], max_new_tokens=7)
    play(open_conversation(chatml, server), ["hi"], max_new_tokens=70)
    play(open_conversation(chatml, server, max_length=prompt + 5), ["hi"])
    assert [request.sampling.max_new_tokens for request in server.requests] == [7, 32, 5]


def test_what_a_call_leaves_open_is_its_contexts(chatml):
    sampling = SamplingParams(9, 0.7, 0.9, 40, 0.1, 1.2, (5,), ("a",), False, 11)
    assert all(getattr(sampling, field.name) != field.default for field in fields(sampling)), (
        "a new field: set it here too"
    )
    server = ScriptedServer(lambda request: chatml.respond("x"))
    play(open_conversation(chatml, server, sampling=sampling), ["hi"])
    stops = server.requests[0].sampling.stop_token_ids
    assert stops[0] == 5 and len(stops) > 1
    assert server.requests[0].sampling == replace(sampling, stop_token_ids=stops, seed=derive_seed(11, 0))


@pytest.mark.parametrize(
    "messages", ["hello", ["hello"], [None], {"role": "user", "content": "hello"}, None, 5], ids=repr
)
def test_what_are_no_messages_is_a_sentence(chatml, messages):
    async def complete(*_):
        return TextAnswer("", "stop")

    of_texts = TextConversation(complete, SAMPLING)
    for conversation in (open_conversation(chatml, ScriptedServer(lambda request: [65])), of_texts):
        with pytest.raises(
            ChatTemplateError, match=r"a list of messages, each a mapping with `role` and `content`"
        ):
            asyncio.run(conversation.generate(messages))


def test_options_are_those_of_their_call_alone(chatml):
    server = ScriptedServer(lambda request: chatml.respond("x"))
    conversation = open_conversation(chatml, server, sampling=replace(SAMPLING, stop_strings=("a",)))

    async def talk():
        for options in (
            CallOptions(),
            CallOptions(temperature=1.3, stop=("b", "c")),
            CallOptions(temperature=0),
            CallOptions(),
        ):
            await conversation.generate([user("hi")], options)

    asyncio.run(talk())
    asked = [request.sampling for request in server.requests]
    assert [sampling.temperature for sampling in asked] == [1.0, 1.3, 0, 1.0]
    assert [sampling.stop_strings for sampling in asked] == [("a",), ("b", "c"), ("a",), ("a",)]
    assert [turn.sampling for turn in conversation.turns] == asked
    assert [turn.is_greedy for turn in conversation.turns] == [False, False, True, False]


def test_other_tools_start_a_new_context_that_holds_the_whole_conversation():
    template = ChatTemplate(byte_tokenizer(chat_template=CHAT_TEMPLATE))
    tools = [tool(name, f"Does {name}.") for name in "fg"]
    server = ScriptedServer(lambda request: template.respond(f"answer {len(server.requests)}"))
    conversation = open_conversation(template, server, tools=tools[:1], parent=4)

    async def talk():
        for text, options in (("1", None), ("2", tools[:1]), ("3", tools), ("4", None), ("5", ())):
            await conversation.generate([user(text)], CallOptions(tools=options))

    asyncio.run(talk())
    conversation.verify()
    turns = conversation.turns
    assert [turn.starts_context for turn in turns] == [True, False, True, False, True]
    assert [turn.parent for turn in turns] == [4, None, None, None, None] and server.released == [
        "episode-0"
    ] * 2
    said = [user("1"), assistant("answer 1"), user("2"), assistant("answer 2")]
    assert (
        turns[2].prompt_ids.tolist() == template.start([*said, user("3")], tools)
        and turns[2].observation == "3"
    )
    samples = build_samples(Trajectory(Task("t", "T", "train", 0), 0, turns=turns))
    assert [[span.turn for span in sample.turn_spans] for sample in samples] == [[0, 1], [2, 3], [4]]
    assert [list(request.prompt_ids) for request in server.requests][2:] == [
        turns[2].prompt_ids.tolist(),
        [*samples[1].token_ids[: samples[1].turn_spans[1].start]],
        turns[4].prompt_ids.tolist(),
    ]
    turns[0].response_ids[0] += 1
    with pytest.raises(RolloutError, match=f"from position {len(turns[0].prompt_ids)} on"):
        conversation.verify()


def test_other_tools_without_room_for_the_whole_conversation_change_nothing():
    template = ChatTemplate(byte_tokenizer(chat_template=CHAT_TEMPLATE))
    server = ScriptedServer(lambda request: [65] * 4)
    conversation = open_conversation(template, server, max_length=len(template.start([user("hi")])) + 12)
    play(conversation, ["hi"])
    tools = [tool("f", "x" * 100)]
    assert asyncio.run(conversation.generate([user("hi")], CallOptions(tools=tools))) is None
    assert len(conversation.turns) == 1 and conversation.remaining_tokens() == 8 and not server.released
    conversation.verify()


def test_a_context_without_room_ends_on_sampled_tokens(chatml):
    first = chatml.start([user("hi")])
    added = chatml.extend([65] * 10, [user("hi")])
    for spare, is_played in ((0, False), (1, True)):
        max_length = len(first) + 10 + len(added) + spare
        server = ScriptedServer(lambda request: [65] * 10)
        conversation = open_conversation(chatml, server, max_length)
        answers = play(conversation, ["hi", "hi"], max_new_tokens=10)
        assert (answers[1] is not None) == is_played
        assert len(conversation.turns) == 1 + is_played == len(server.requests)
        assert conversation.remaining_tokens() == (0 if is_played else len(added))
        conversation.verify()


def test_a_first_prompt_that_does_not_fit_names_the_numbers_and_the_setting(chatml):
    prompt = len(chatml.start([user("hello")]))
    server = ScriptedServer([])
    with pytest.raises(RolloutError, match=rf"{prompt} tokens .* sequence_length {prompt}"):
        play(open_conversation(chatml, server, max_length=prompt), ["hello"])
    assert not server.requests


def test_a_later_context_without_room_for_its_first_prompt_is_a_limit(chatml):
    server = ScriptedServer([])
    conversation = open_conversation(chatml, server, max_length=4, opens_episode=False)
    assert play(conversation, ["hello"]) == [None]
    assert conversation.turns == [] == server.requests


def test_a_closed_context_is_forgotten_by_the_server_once_and_says_nothing_more(chatml):
    server = ScriptedServer([chatml.respond("a")])
    conversation = open_conversation(chatml, server)
    play(conversation, ["one"])

    async def close_twice():
        await conversation.close()
        await conversation.close()

    asyncio.run(close_twice())
    assert server.released == ["episode-0"]
    conversation.verify()
    with pytest.raises(RolloutError, match="'episode-0' is closed"):
        play(conversation, ["two"])


def test_a_refused_request_leaves_the_ledger_as_it_was(chatml):
    conversation = open_conversation(chatml, ScriptedServer([chatml.respond("a")]))
    play(conversation, ["one"])
    left = conversation.remaining_tokens()
    with pytest.raises(ServerError, match="no response left"):
        play(conversation, ["two"])
    with pytest.raises(ChatTemplateError, match="takes strings only"):
        asyncio.run(conversation.generate([user([{"type": "image"}])]))
    assert len(conversation.turns) == 1 and conversation.remaining_tokens() == left


def test_an_aborted_response_keeps_its_partial_tokens_and_is_closed(chatml):
    class Aborting(ScriptedServer):
        async def generate(self, prompt_ids, sampling, request_id, media=()):
            completion = await super().generate(prompt_ids, sampling, request_id, media)
            return replace(completion, finish_reason="aborted") if len(self.requests) == 1 else completion

    conversation = open_conversation(chatml, Aborting([[65, 66], chatml.respond("b")]))
    answers = play(conversation, ["one", "two"])
    assert conversation.turns[0].finish_reason == "aborted" and len(answers[0]["content"]) == 2
    assert conversation.turns[1].prompt_ids[0] == chatml.stop_token_ids[0]
    conversation.verify()


class Careless:
    """A server that answers with these tokens and this finish reason, whatever it is asked."""

    def __init__(self, token_ids, reason):
        zeros = np.zeros(len(token_ids), np.float32)
        self.completion = Completion(
            np.array(token_ids, np.int64), zeros, reason, (VersionRun(0, len(token_ids)),)
        )

    async def generate(self, prompt_ids, sampling, request_id, media=()):
        return self.completion


@pytest.mark.parametrize(
    ("server", "complaint"),
    [
        (Careless([65] * 33, "length"), "33 tokens, more than the 32"),
        (Careless([65], "eos"), "finish reason 'eos'"),
        (Careless([65], "stop"), "keep the stop token"),
        (Careless([], "stop"), "keep the stop token"),
    ],
)
def test_an_answer_that_breaks_the_contract_is_refused(chatml, server, complaint):
    with pytest.raises(ServerError, match=complaint):
        play(open_conversation(chatml, server), ["hi"])


def test_a_stop_string_ends_a_response_without_a_stop_token(chatml):
    sampling = replace(SAMPLING, stop_strings=("A",))
    conversation = open_conversation(chatml, Careless([65], "stop"), sampling=sampling)
    assert play(conversation, ["hi"])[0] is not None


def test_verify_finds_a_turn_whose_ids_were_changed(chatml):
    conversation = open_conversation(chatml, ScriptedServer(lambda request: chatml.respond("a")))
    play(conversation, ["one", "two"])
    conversation.verify()
    conversation.turns[1].response_ids[0] += 1
    position = conversation.turns[0].num_tokens + len(conversation.turns[1].prompt_ids)
    with pytest.raises(RolloutError, match=f"from position {position} on"):
        conversation.verify()


@pytest.mark.parametrize("family", ["gemma3-control-flow"], indirect=True)
def test_images_reach_the_server_with_the_whole_context_and_the_turn_that_showed_them(template):
    white, black = np.full((2, 2, 3), 255, np.uint8), Media("image", np.zeros((2, 2, 3), np.uint8))
    server = ScriptedServer(lambda request: template.respond("ok"))
    conversation = open_conversation(template, server)

    async def show(image):
        await conversation.generate(
            [user([{"type": "image", "image": image}, {"type": "text", "text": "where?"}])]
        )

    asyncio.run(show(white))
    asyncio.run(show(black))
    assert [len(turn.media) for turn in conversation.turns] == [1, 1]
    assert [len(request.media) for request in server.requests] == [1, 2]
    assert server.requests[1].media[0].data is white and server.requests[1].media[1] is black
    assert conversation.turns[1].observation == "where?"
