from __future__ import annotations

import pytest

from turnwise.errors import ConfigError
from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.inference.hf_server import HFServer
from turnwise.inference.options import check_server_options
from turnwise.spec import STRATEGIES


def test_options_of_the_constructor_pass() -> None:
    check_server_options(EmbeddedServer, {"kv_cache_bytes": 2**20, "max_concurrency": 8, "max_step_tokens": 512})
    check_server_options(HFServer, {})


@pytest.mark.parametrize(
    ("server_class", "options", "message"),
    [
        (EmbeddedServer, {"kv_cache_byte": 1}, r"kv_cache_byte isn't an option.*max_step_tokens.*mean 'kv_cache_bytes'"),
        (HFServer, {"max_concurrency": 8}, "max_concurrency isn't an option; it has none"),
        (EmbeddedServer, {"max_length": 8}, "sequence_length"),
        (EmbeddedServer, {"model": "x"}, "remove it"),
        (HFServer, {"version": 3}, "remove it"),
        (EmbeddedServer, {"kv_cache_bytes": "2GB"}, "kv_cache_bytes is '2GB'"),
        (EmbeddedServer, {"kv_cache_bytes": -1}, "at least 1"),
        (EmbeddedServer, {"max_concurrency": 0}, "at least 1"),
        (EmbeddedServer, {"max_step_tokens": True}, "whole number"),
        (EmbeddedServer, {"max_step_tokens": 2.5}, "whole number"),
    ],
)
def test_what_a_server_cannot_be_told_is_refused(server_class: type, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_server_options(server_class, options)


def test_every_server_of_this_version_can_be_asked() -> None:
    entries = {spec.entry for spec in STRATEGIES.values() if spec.kind == "sampling" and spec.is_available}
    assert entries == {f"{server.__module__}:{server.__name__}" for server in (EmbeddedServer, HFServer)}
