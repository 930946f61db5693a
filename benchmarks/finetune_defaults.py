"""Fine-tuning at everybody's own defaults: the held-out loss after the same minutes, beside peft's Trainer and TRL.

    python -m benchmarks.finetune_defaults -o benchmarks/records/DATE-finetune-defaults.json [--trl PYTHON]
        [--sets chats,facts,tone] [--model MODEL] [--minutes M]

Each set is small, written by a rule, and split into samples to train on and 24 that are kept apart. `roofline finetune`
runs first, with nothing named but the file; the others, with nothing named but the model, the data and LoRA, are
stopped once they have trained as long, or end by themselves. One judge, transformers in float32, computes the loss of
the answers that were kept apart, of all adapters alike. --trl names an interpreter that has the package trl. The
machine should have nothing else to do.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.finetune import software

HELD_OUT = 24
PEFT, TRL, OURS = "peft", "trl", "roofline"
Chats = list[dict[str, list[dict[str, str]]]]


def chat(question: str, answer: str) -> dict[str, list[dict[str, str]]]:
    """A sample in the form of OpenAI's API."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def short_chats() -> Chats:
    """600 short questions whose answers follow one rule, in words of the question."""
    things = ("door", "lamp", "cup", "book", "shoe", "coin", "rope", "bell", "drum", "kite", "plum", "seed")
    colours = ("red", "blue", "green", "black", "white")
    places = ("hall", "yard", "shop", "barn", "tent", "loft", "mill", "dock", "cave", "gate", "park")
    triples = [(a, b, c) for a in things for b in colours for c in places][: 600 + HELD_OUT]
    return [
        chat(
            f"Where is the {colour} {thing} of the {place}?",
            f"The {thing} ({colour}) lies in the {place}, shelf {n % 7}.",
        )
        for n, (thing, colour, place) in enumerate(triples)
    ]


def facts() -> Chats:
    """120 questions about invented parts, each answered in a fixed form of some lines."""
    makers = ("Arden", "Bellweather", "Corvane", "Dunmore", "Eastlake", "Farrow")
    return [
        chat(
            f"Describe part {maker[0]}{n:03d} by {maker}.",
            f"Part: {maker[0]}{n:03d}\nMaker: {maker}\nWeight: {n * 7 % 90 + 10} g\nMaterial: "
            f"{('steel', 'brass', 'oak')[n % 3]}\nUse: keeps a {('gate', 'press', 'loom', 'pump')[n % 4]} in place.",
        )
        for n in range(120 + HELD_OUT)
        for maker in (makers[n % len(makers)],)
    ]


def tone() -> Chats:
    """300 requests of several sentences that are answered at length and in one tone."""
    topics = ("tea", "rain", "trains", "bread", "ships", "maps", "bees", "glass", "snow", "clocks", "rivers", "wool")
    moods = ("briefly", "for a child", "for a visitor", "in plain words", "for a class")
    return [
        chat(
            f"I would like to hear about {topic}. It is request {n}, and I have a few minutes. Tell it {mood}.",
            f"Gladly, friend. Request {n} is about {topic}, so here is {topic} told {mood}. First, look at {topic} "
            f"with care: there is more in {topic} than one sees. Second, ask one who works with {topic} every day. "
            f"Third, come back and tell me what you learnt of {topic}. That is all, friend, and thank you for asking.",
        )
        for n in range(300 + HELD_OUT)
        for topic, mood in ((topics[n % len(topics)], moods[n % len(moods)]),)
    ]


SETS: dict[str, Callable[[], Chats]] = {"chats": short_chats, "facts": facts, "tone": tone}


def split(samples: Chats) -> tuple[Chats, Chats]:
    """Samples to train on, and every so many kept apart."""
    stride = len(samples) // HELD_OUT
    apart = {n * stride for n in range(HELD_OUT)}
    return [s for n, s in enumerate(samples) if n not in apart], [samples[n] for n in sorted(apart)]


def write(path: Path, samples: Chats) -> Path:
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path


def timed(command: list[str], seconds: float) -> tuple[float, int]:
    """Run a command to its end: the seconds, and the bytes it took at most, its children included."""
    begun = time.perf_counter()
    wrapped = ["import resource, subprocess, sys", "status = subprocess.call(sys.argv[1:], stdout=2)"]
    wrapped += ["print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)", "sys.exit(status)"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(wrapped), *command],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=seconds,
    )
    return time.perf_counter() - begun, int(done.stdout.split()[-1]) * 1024


def ours(model: str, data: Path, folder: Path, seconds: float) -> dict[str, float | int | str]:
    """`roofline finetune` with nothing named but what it must be told."""
    command = [sys.executable, "-m", "roofline", "finetune", model, str(data), "--out", str(folder)]
    total, peak = timed([*command, "--ask", "0", "--eval-share", "0"], seconds)
    card = json.loads((folder / "card.json").read_text())
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [line["seconds"] for line in lines if "loss" in line and "seconds" in line]
    return {
        "steps": len(steps),
        "training_s": round(sum(steps), 1),
        "total_s": round(total, 1),
        "tokens_per_s": round(card["speed"]["tokens_per_s"], 1),
        "peak_bytes": peak,
    }


def theirs(python: str, name: str, plain: Path, data: Path, out: Path, limit: float) -> dict[str, float | int | str]:
    """A trainer in a process of its own, which stops itself after `limit` seconds of steps."""
    worker = Path(__file__).with_name("finetune_defaults_worker.py")
    arguments = [name, str(plain), str(data), str(out), str(limit)]
    total, peak = timed([python, str(worker), *arguments], 20 * limit + 600)
    return json.loads((out / "run.json").read_text()) | {"total_s": round(total, 1), "peak_bytes": peak}


def measure(model: str, names: list[str], trl: str | None, seconds: float) -> dict[str, object]:
    """Figures of each contestant and set."""
    from roofline.bundle.rewrite import RewriteWork, write_safetensors
    from roofline.weights.checkpoint import open_checkpoint
    from roofline.weights.sources import resolve

    record: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="roofline-bench-defaults-") as name:
        folder, plain = Path(name), Path(name) / "model"
        write_safetensors(open_checkpoint(resolve(model)), plain, "BF16", RewriteWork())
        for kind in names:
            trained, apart = split(SETS[kind]())
            data, questions = write(folder / f"{kind}.jsonl", trained), write(folder / f"{kind}-apart.jsonl", apart)
            rows = {OURS: ours(model, data, folder / f"{kind}-ours", seconds)}
            limit = float(rows[OURS]["training_s"])
            adapters = {"base": None, OURS: folder / f"{kind}-ours/adapter"}
            for other, python in ((PEFT, sys.executable), (TRL, trl)):
                if python is not None:
                    adapters[other] = folder / f"{kind}-{other}"
                    rows[other] = theirs(python, other, plain, data, folder / f"{kind}-{other}", limit)
            losses = {name: held_out_loss(plain, adapter, questions) for name, adapter in adapters.items()}
            record[kind] = {"samples": len(trained), "held_out_loss": losses, **rows}
            print(json.dumps({kind: record[kind]}), file=sys.stderr, flush=True)
    return record


def held_out_loss(plain: Path, adapter: Path | None, questions: Path) -> float:
    """The mean loss of the tokens of all answers and of what ends them, in float32."""
    worker = Path(__file__).with_name("finetune_defaults_worker.py")
    arguments = ["judge", str(plain), str(questions), str(adapter or "")]
    done = subprocess.run([sys.executable, str(worker), *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return round(float(done.stdout.split()[-1]), 4)


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--trl", help="an interpreter with the package trl")
    parser.add_argument("--seconds", type=float, default=3600, help="that our run may take at most")
    options = parser.parse_args()
    record = {
        "date": datetime.date.today().isoformat(),
        "model": options.model,
        "software": software(),
        "sets": measure(options.model, options.sets.split(","), options.trl, options.seconds),
    }
    print(json.dumps(record, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
