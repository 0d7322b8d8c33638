"""Writes the sections of Markdown pages as text to try BERT with:   python pages.py FOLDER OUTPUT.jsonl

Each section is a document; tables and code are left out.
"""

import json
import re
import sys
from pathlib import Path

folder, output = map(Path, sys.argv[1:])
with output.open("w") as file:
    for page in sorted(folder.rglob("*.md")):
        text = re.sub(r"```.*?```|^\|.*?$|^<!--.*?$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for section in re.split(r"^#+ .*$", text, flags=re.MULTILINE):
            words = " ".join(section.split())
            if words.count(". ") > 1:
                file.write(json.dumps({"text": words}) + "\n")
