"""Programs that offer another protocol with each request, as they are installed: curl, and Java's own client, which
LangChain4j and Spring AI are built on."""

import json
import shutil
import subprocess

import pytest

from tests.server.raw_http import told

BODY = '{"prompt": "mine"}'
JAVA = """
import java.net.*; import java.net.http.*; import java.net.http.HttpResponse.BodyHandlers;
public class Client {
    public static void main(String[] words) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int i = 0; i < 3; i++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(words[0]))
                .header("Content-Type", "application/json").POST(HttpRequest.BodyPublishers.ofString(words[1])).build();
            HttpResponse<String> answer = client.send(request, BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.body());
        }
    }
}
"""


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_with_http2(live):
    address, json_type = live(), "content-type: application/json"
    assert told(output("curl", "-s", "--http2", f"{address}/tokenize", "-H", json_type, "-d", BODY).encode()) == "mine"
    ask = json.dumps({"model": "tiny", "prompt": "Hi", "stream": True})
    stream = output("curl", "-sN", "--http2", f"{address}/v1/completions", "-H", json_type, "-d", ask)
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == "Hello, world."


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_that_takes_http2_for_granted_comes_to_an_end(live):
    command = ["curl", "-sS", "--max-time", "20", "--http2-prior-knowledge", f"{live()}/limits"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode not in (0, 28), "a timeout is no clear end"
    assert ended.stderr


@pytest.mark.skipif(shutil.which("ab") is None, reason="ApacheBench is not installed")
@pytest.mark.parametrize("keep", [True, False])
def test_apache_bench(live, tmp_path, keep):
    """It sends HTTP/1.0, and believes that a connection is kept if it is told so."""
    body = tmp_path / "body"
    body.write_text(BODY)
    options = ["-k"] if keep else []
    options += ["-n", "40", "-c", "4", "-p", str(body), "-T", "application/json"]
    figures = dict(
        line.split(":", 1) for line in output("ab", "-q", *options, f"{live()}/tokenize").splitlines() if ":" in line
    )
    assert int(figures["Complete requests"]) == 40
    assert int(figures["Failed requests"]) == 0
    assert "Non-2xx responses" not in figures
    assert int(figures.get("Keep-Alive requests", 0)) == (40 if keep else 0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("javac") is None, reason="there is no JDK")
def test_javas_client(live, tmp_path):
    (tmp_path / "Client.java").write_text(JAVA)
    lines = output("java", str(tmp_path / "Client.java"), f"{live()}/tokenize", BODY).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["200"] * 3
    assert {told(line.partition(" ")[2].encode()) for line in lines} == {"mine"}
