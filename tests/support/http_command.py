"""A command that plays an episode over HTTP."""

import json
import os
import sys
import urllib.request


def main() -> None:
    task = json.loads(sys.stdin.readline())
    text = f"{task['prompt']} {os.environ.get('WORD', '')}"
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    print(json.dumps({"answer": answer["choices"][0]["message"]["content"]}))


if __name__ == "__main__":
    main()
