"""A template that loops or takes all memory is refused by name; a sound one passes and renders as in
transformers."""

from __future__ import annotations

import json
import os
import shutil
import threading

import pytest
from chat_messages import assistant, tool, user
from transformers import AutoTokenizer

from turnwise.chat import rendering, trial
from turnwise.chat.folder_tokenizer import FolderTokenizer
from turnwise.chat.rendering import Renderer
from turnwise.chat.template import ChatTemplate
from turnwise.cli.main import main
from turnwise.errors import ChatTemplateError
from turnwise.runtime.time_limit import TimeLimit
from turnwise.testing.fakes import CHATML_TEMPLATE, byte_tokenizer

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
MOODY = CHATML_TEMPLATE.replace("<|im_start|>{{ message.role }}", "{{ mood or '' }}{{ message.role }}")


@pytest.fixture
def config(tmp_path, tiny_model):
    """A config of fine-tuning, and the folder of its model."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    rows = [{"messages": [user("P _ G"), assistant("Right")]}] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "sft.yaml"
    path.write_text(
        f"pretrain: {model}\ntrain_files: {tmp_path}/rows.jsonl\noutput_dir: {tmp_path}/runs\nmax_steps: 1\n"
        "sequence_length: 64\ntrack_with: []\n"
    )
    return path, model


@pytest.mark.parametrize("where", ["{% if messages | length > 50 %}", "{% if tools %}"])
def test_a_template_that_loops_is_named_with_its_file(config, capsys, monkeypatch, where):
    monkeypatch.setattr(trial, "CPU_S", 1)
    path, model = config
    (model / "chat_template.jinja").write_text(where + LOOP + "{% endif %}" + CHATML_TEMPLATE)
    assert main(["sft", str(path)]) == 2
    error = capsys.readouterr().err
    assert str(model / "chat_template.jinja") in error.replace("\n", "") and "loop" in error


WHERE = [
    "add_generation_prompt",
    "not add_generation_prompt",
    "messages[0].content is not string",
    "mood and eos_token",
]
WHERE += [
    "messages | length > 150 and tools",
    "messages[0].role == 'system' %}{{ raise_exception('no') }}{% elif tools",
]


@pytest.mark.parametrize("where", [*WHERE, "true %}{% generation %}{% endgeneration"])
def test_a_template_that_takes_all_memory_is_refused_wherever_it_does(where, monkeypatch):
    monkeypatch.setattr(trial, "_BYTES", 2**30)
    tokenizer = byte_tokenizer(chat_template=f"{{% if {where} %}}{{{{ 'a' * 2**30 }}}}{{% endif %}}{MOODY}")
    with pytest.raises(ChatTemplateError, match="takes more than 1 GiB"):
        trial.tried(ChatTemplate(tokenizer, template_kwargs={"mood": "cheerful"}))


@pytest.mark.parametrize(
    "file", [None, "{{ messages[0].content }}{% generation %}{{ bos_token }}{% endgeneration %}"]
)
@pytest.mark.parametrize("tools", [[], [tool("look", "Schaut: é")]], ids=["", "tools"])
@pytest.mark.parametrize("kwargs", [{}, {"bos_token": "B"}], ids=["", "kwargs"])
def test_a_folder_renders_as_its_tokenizer_does(tmp_path, tools, kwargs, file):
    byte_tokenizer(chat_template=None).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    sources = {
        "default": "{{ messages[0].content + bos_token }}",
        "tool_use": "{{ tools | tojson }}{{ eos_token }}",
    }
    settings["chat_template"] = [{"name": name, "template": source} for name, source in sources.items()]
    settings["bos_token"] = {"__type": "AddedToken", "content": "<|im_start|>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if file:
        (tmp_path / "chat_template.jinja").write_text(file)
    if file and kwargs:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(
            "{{ tools[0].function.name + bos_token }}"
        )
    tokenizers = AutoTokenizer.from_pretrained(tmp_path), FolderTokenizer(tmp_path)
    assert (
        len({Renderer(tokenizer, None, kwargs).render([user("a")], tools) for tokenizer in tokenizers}) == 1
    )


def test_a_template_that_refuses_most_conversations_is_no_template_that_loops(config):
    path, model = config
    refusing = (
        "{% if messages | length > 2 or tools %}{{ raise_exception('no') }}{% endif %}" + CHATML_TEMPLATE
    )
    (model / "chat_template.jinja").write_text(refusing.replace("> 2", "> 3"))
    assert main(["sft", str(path)]) == 0


def test_variables_of_the_template_reach_what_is_learnt(config, capsys):
    path, model = config
    (model / "chat_template.jinja").write_text(MOODY)
    long = "x " * 40
    assert main(["sft", str(path), f"template_kwargs={{mood: '{long}'}}"]) == 2
    assert "more than sequence_length 64" in capsys.readouterr().err.replace("\n", " ")
    assert main(["sft", str(path), "template_kwargs={moood: x}"]) == 2
    assert "template_kwargs.moood" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["model", "scripted"])
def test_variables_of_the_template_reach_what_is_played(config, tmp_path, capsys, policy):
    _, model = config
    (model / "chat_template.jinja").write_text(MOODY)
    lake = tmp_path / "lake.yaml"
    lake.write_text(
        f"pretrain: {model}\nsequence_length: 256\ntemplate_kwargs: {{mood: cheerful}}\ncustom_envs:\n  "
        f"Lake:\n"
        "    env_type: frozen_lake\n    env_config: {env_instruction: ''}\n    max_steps: 1\n    "
        "max_tokens_per_step: 8\n"
        "    agent_system_template: ''\n    agent_template: '{observation}'\n"
    )
    chosen = (
        ["--policy", str(model)] if policy == "model" else ["--policy", "scripted", "--tokenizer", str(model)]
    )
    assert main(["play", str(lake), *chosen]) == 0
    assert "cheerfuluser" in capsys.readouterr().out


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_template_that_loops_on_real_messages_only_is_ended_and_named(monkeypatch, in_thread):
    monkeypatch.setattr(rendering, "RENDERING", TimeLimit(0.2, 0.05))
    source = "{% if 'real' in messages[0].content %}" + LOOP + "{% endif %}" + CHATML_TEMPLATE
    template = trial.tried(ChatTemplate(byte_tokenizer(chat_template=source)))
    refusals = []

    def start():
        with pytest.raises(ChatTemplateError) as refusal:
            template.start([user("a real question")])
        refusals.append(str(refusal.value))
        assert template.start([user("another")]), "the next rendering has a limit of its own"

    worker = threading.Thread(target=start)
    worker.run() if not in_thread else (worker.start(), worker.join())
    assert all(word in refusals[0] for word in ("a real question", "loop", "user"))


def test_a_process_that_was_forked_renders():
    template = ChatTemplate(byte_tokenizer())
    template.start([user("a")])
    child = os.fork()
    if child == 0:
        os._exit(0 if template.renderer.render([user("b")]) else 1)
    assert os.waitpid(child, 0)[1] == 0
