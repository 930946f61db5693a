"""Class I of known weaknesses (cache confidentiality): prefixes in the cache are a key's own.

The engine is a real one over a toy executable: which pages it shares is what is tested.
"""

import asyncio
from pathlib import Path

import httpx
import pytest

from roofline.engine.local import LocalEngine
from roofline.engine.process.thread import engine_in_thread
from roofline.server.app import create_app
from roofline.server.keys import Keys, read_keys

TEXT = {"model": "tiny", "prompt": "x" * 100, "max_tokens": 1, "temperature": 0}
FILE = '[[keys]]\nname = "ann"\nkey = "a"\n[[keys]]\nname = "bob"\nkey = "b"\n'


@pytest.fixture
def cached(make_context, monkeypatch):
    """cached(keys, requests) -> usage.cached_tokens of requests (key, changes of the body) that are sent in turn."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "engine")
    from engine_fakes import FakeExecutable

    async def send_all(keys, requests):
        engine = engine_in_thread("toy", LocalEngine(FakeExecutable(vocab_size=300)))
        async with asyncio.timeout(60):
            await engine.start()
            try:
                transport = httpx.ASGITransport(create_app(make_context(engine=engine, keys=keys)))
                async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                    return [await cached_tokens(client, key, changes) for key, changes in requests]
            finally:
                await engine.close()

    async def cached_tokens(client, key, changes):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        answer = await client.post("/v1/completions", json={**TEXT, **changes}, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    return lambda keys, requests: asyncio.run(send_all(keys, requests))


@pytest.fixture
def keys(tmp_path):
    (tmp_path / "keys.toml").write_text(FILE)
    return Keys(file=tmp_path / "keys.toml")


def test_class_i_one_key_finds_its_prefixes_and_another_does_not(cached, keys):
    counts = cached(keys, [("a", {}), ("a", {}), ("b", {}), ("b", {}), ("a", {})])
    assert [count > 0 for count in counts] == [False, True, False, True, True]


def test_class_i_a_salt_of_the_client_divides_a_key_and_joins_no_two(cached, keys, tmp_path):
    salts = [principal.salt for principal in read_keys(tmp_path / "keys.toml").values()]
    mine, ours = {"cache_salt": "mine"}, {"cache_salt": "ours"}
    counts = cached(keys, [("a", mine), ("a", mine), ("a", ours), ("a", {}), ("b", mine), ("b", mine)])
    assert [count > 0 for count in counts] == [False, True, False, False, False, True]
    guesses = [{"cache_salt": guess} for salt in salts for guess in (salt, f"{salt}/mine", f"/{salt}")]
    assert cached(keys, [("a", {}), ("a", mine), *(("b", guess) for guess in guesses)]) == [0] * (2 + len(guesses))


def test_without_keys_all_share(cached):
    counts = cached(Keys(), [("", {}), ("", {}), ("", {"cache_salt": "mine"}), ("", {"cache_salt": "mine"})])
    assert [count > 0 for count in counts] == [False, True, False, True]


@pytest.mark.parametrize("salt", ["", "x" * 257, 5])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_a_salt_that_cannot_be_is_refused(call, engine, route, salt):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]} if "chat" in route else TEXT
    refused = call("POST", f"/v1/{route}", json={**body, "cache_salt": salt})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")
    assert not engine.submitted


def test_salts_reach_the_engine(call, make_context, engine, keys):
    context = make_context(keys=keys)
    (ann, _) = [principal.salt for principal in keys._principals.values()]
    for changes in ({}, {"cache_salt": "mine"}):
        call("POST", "/v1/completions", json={**TEXT, **changes}, headers={"x-api-key": "a"}, context=context)
    call("POST", "/v1/completions", json=TEXT)
    assert engine.salts == [ann, f"{ann}/mine", ""]
