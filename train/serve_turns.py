"""One vLLM engine that decodes a prompt at each request, so that our own loop can take turns with it.

Runs inside vLLM's own environment (`make setup-vllm`) and imports nothing of ours; `train.serving` starts it.

    python serve_turns.py JOB.json
    JOB     as serve_client.py reads it
    stdin   a prompt's number a line
    stdout  {"ready": true} when the engine stands, then for each number {"seconds", "token_ids"}
"""

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes to stdout as well
    from vllm import LLM, SamplingParams  # here, so that a child process of the engine does not import it twice

    llm, params = LLM(**job["engine"]), SamplingParams(**job["sampling"])
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        [output] = llm.generate([{"prompt_token_ids": job["prompts"][int(line)]}], params, use_tqdm=False)
        answer = {"seconds": time.perf_counter() - start, "token_ids": list(output.outputs[0].token_ids)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
