"""The kernels in C against torch, and what happens where they can't be had."""

from __future__ import annotations

import shlex
import tomllib

import pytest
import torch
import torch.nn.functional as F

from turnwise.errors import ConfigError
from turnwise.models.cpu import build

kernels = build.load_kernels()
needs_kernels = pytest.mark.skipif(kernels is None, reason="no C compiler")


@pytest.fixture
def lib():
    assert kernels is not None
    return kernels


@pytest.fixture
def quick(monkeypatch, tmp_path_factory):
    """A compiler that doesn't optimise, which would take twenty times as long."""
    [compiler, *options] = next(build._compilers())
    folder = tmp_path_factory.mktemp("compiler")
    return [use_compiler(monkeypatch, folder, f'exec {shlex.join([compiler, *options])} "$@" -O0')]


def use_compiler(monkeypatch, folder, does):
    """Makes a script the compiler, and returns its path."""
    script = folder / "compiler"
    script.write_text(f"#!/bin/sh\n{does}\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    return str(script)


@pytest.fixture(autouse=True)
def fresh():
    """Asks for the kernels anew in each test, and again afterwards."""
    build._load.cache_clear()
    yield
    build._load.cache_clear()


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@needs_kernels
@pytest.mark.parametrize("size", [8, 32, 40, 129])
def test_rms_norm(lib, size):
    x, weight = normal(50, size), normal(size)
    out = torch.empty_like(x)
    lib.rms_norm(x.data_ptr(), weight.data_ptr(), 1e-6, out.data_ptr(), 50, size, 2)
    torch.testing.assert_close(out, F.rms_norm(x, (size,), weight, 1e-6))


@needs_kernels
@pytest.mark.parametrize("size", [8, 24, 37])
def test_silu_mul_over_the_whole_range(lib, size):
    gate_up = torch.cat((torch.linspace(-120, 120, 40 * size).view(40, size), normal(40, size)), 1)
    out = torch.empty(40, size)
    lib.silu_mul(gate_up.data_ptr(), out.data_ptr(), 40, size, 2)
    torch.testing.assert_close(out, F.silu(gate_up[:, :size]) * gate_up[:, size:], rtol=1e-5, atol=1e-7)


@needs_kernels
def test_what_is_compiled_is_kept(tmp_path, quick):
    library = build.compiled(build.FOLDER, quick, tmp_path)
    # A second time no compiler runs: this one would fail.
    made = library.stat().st_ino
    assert build.compiled(build.FOLDER, quick, tmp_path) == library
    assert library.stat().st_ino == made
    assert [path.name for path in tmp_path.iterdir()] == [library.name]


@needs_kernels
def test_a_library_that_was_cut_off_is_made_again(monkeypatch, tmp_path, quick):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = build.compiled(build.FOLDER, quick, build.cache_folder() or tmp_path)
    library.write_bytes(library.read_bytes()[:100])
    assert build.load_kernels() is not None
    assert library.stat().st_size > 100


@needs_kernels
def test_a_folder_that_others_can_write_is_not_trusted(monkeypatch, tmp_path, quick):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "turnwise").mkdir()
    (tmp_path / "turnwise").chmod(0o777)
    assert build.cache_folder() is None
    assert build.load_kernels() is not None
    assert not list((tmp_path / "turnwise").iterdir())


def test_all_sources_are_in_the_package():
    settings = tomllib.loads((build.FOLDER.parents[2] / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["turnwise"]
    packaged = {path for pattern in patterns for path in build.FOLDER.parents[1].glob(pattern)}
    assert packaged >= set(build.FOLDER.glob("*.[ch]")) != set()


def test_without_a_compiler_there_are_none(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert build.load_kernels() is None
    assert "no C compiler" in caplog.text and build.SWITCH in caplog.text


@pytest.mark.parametrize("said", ["march: unknown processor", r"march: \351trange"])
def test_a_compiler_that_refuses_is_quoted(monkeypatch, tmp_path, caplog, said):
    use_compiler(monkeypatch, tmp_path, f"[ $1 = --version ] && exit 0\nprintf '{said}' >&2\nexit 1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert build.load_kernels() is None
    assert "march:" in caplog.text
    assert not list((tmp_path / "cache" / "turnwise").iterdir())


@pytest.mark.parametrize("compiler", ["no-such-compiler", "gcc 'x"])
def test_a_compiler_that_is_not_there_is_named(monkeypatch, compiler, caplog):
    monkeypatch.setenv("CC", compiler)
    assert build.load_kernels() is None
    assert compiler.split()[0] in caplog.text


def test_they_can_be_switched_off(monkeypatch):
    monkeypatch.setenv(build.SWITCH, "off")
    assert build.load_kernels() is None


def test_a_switch_is_on_or_off(monkeypatch):
    monkeypatch.setenv(build.SWITCH, "0")
    with pytest.raises(ConfigError, match="'0'; it may be on or off"):
        build.load_kernels()


@needs_kernels
def test_a_home_that_cannot_be_written_is_left_alone(monkeypatch, tmp_path, quick):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert build.cache_folder() is None
    assert build.load_kernels() is not None


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_cache_under_a_folder_that_others_can_write_is_left_alone(monkeypatch, tmp_path, caplog, mode):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "open" / "own"))
    assert build.cache_folder() == tmp_path / "open" / "own" / "turnwise"
    (tmp_path / "open").chmod(mode)
    assert build.cache_folder() is None and f"others can write to {tmp_path / 'open'}" in caplog.text
    (tmp_path / "open").chmod(mode | 0o1000)
    assert build.cache_folder() is not None, "in a sticky folder others can't replace it"


def test_what_can_not_be_loaded_is_no_lack_of_a_compiler(monkeypatch, tmp_path, caplog):
    does = "[ $1 = --version ] && exit 0\nwhile [ $1 != -o ]; do shift; done\necho no library > $2"
    use_compiler(monkeypatch, tmp_path, does)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert build.load_kernels() is None
    assert "a folder where programs may run" in caplog.text and "nstall gcc" not in caplog.text
