"""GET /openapi.json: it lists what there is, and what it promises is so."""

import json
import re

import jsonschema
import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, given, settings

from roofline.server.app import ROUTERS
from roofline.server.keys import Keys
from tests.server.text_sides import chatml

ROUTES = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
SECRET = "s3cret"


@pytest.fixture
def document(call):
    return call("GET", "/openapi.json").json()


def test_every_route_is_listed_with_its_body(document):
    listed = {(path, method) for path, operations in document["paths"].items() for method in operations}
    assert listed == {(re.sub(r":\w+}", "}", route.path), each.lower()) for route in ROUTES for each in route.methods}
    without_body = [
        path
        for path, operations in document["paths"].items()
        if "requestBody" not in operations.get("post", {"requestBody": 1})
    ]
    assert without_body == ["/v1/files", "/v1/batches/{batch_id}/cancel", "/v1/responses/{name}/cancel"]
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert all(operation["summary"] for operation in operations)
    assert document["paths"]["/health"]["get"]["security"] == []
    assert "security" not in document["paths"]["/stats"]["get"]


def test_bodies_are_schemas_of_what_is_read(document):
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**chat, "components": document["components"]})
    message = {"role": "user", "content": "Hi"}
    assert validator.is_valid({"model": "tiny", "messages": [message]})
    assert not validator.is_valid({"model": "tiny", "messages": [{**message, "extra": 1}]})
    assert not validator.is_valid({"messages": [message]})
    assert not validator.is_valid({"model": "tiny", "messages": [message], "temperature": "hot"})


def test_it_needs_a_key_where_there_is_one(call, make_context):
    context = make_context(keys=Keys(SECRET))
    assert call("GET", "/openapi.json", context=context).status_code == 401
    headers = {"authorization": f"Bearer {SECRET}"}
    assert call("GET", "/openapi.json", context=context, headers=headers).status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("examples", [20, pytest.param(60, marks=pytest.mark.soak)])
def test_class_c_schemathesis_finds_no_failure_of_ours(live, examples):
    """Bodies, paths and headers as the document allows them, and as it does not: none is answered with 5xx, and all
    answers are JSON, events, or text of a form that the route has."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    schema = schemathesis.openapi.from_url(live(text=chatml()) + "/openapi.json")
    tried = []

    def check(operation):
        @given(case=operation.as_strategy())
        @settings(max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        def each(case):
            answer = case.call()
            tried.append(answer.status_code)
            # 501: files and batches, which the server was not started with.
            assert answer.status_code < 500 or answer.status_code == 501, (case.as_curl_command(), answer.text)
            if answer.status_code >= 400 and case.method != "HEAD":
                json.loads(answer.text)

        each()

    for result in schema.get_all_operations():
        check(result.ok())
    assert len(tried) > 16 * examples
    assert tried.count(200) >= 0.1 * len(tried)
