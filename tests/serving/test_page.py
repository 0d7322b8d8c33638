"""The page: no external resources, and in a real browser."""

import re
import shutil
from pathlib import Path

import pytest
from support.served import served

from megatron.data.tokenizer.sft import SFTTokenizer
from megatron.serving.page import PAGE, policy_of

FOLDER = Path(__file__).parents[1] / "data/golden/corpus/hf"


def test_nothing_comes_from_elsewhere() -> None:
    text = PAGE.decode()
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?:", text) and "innerHTML" not in text
    assert policy_of(b"<style>a</style><script>b</script>").split("; ")[:3] == [
        "default-src 'none'",
        "style-src 'sha256-ypeBEsobvcr6wjGzmiPcTaeG7/gUfE5yuYB3ha/uSLs='",
        "script-src 'sha256-PiPoFgA5WUoziU9lZOGxNIu9egCI1CxKy3PurtWcAJ0='",
    ]


@pytest.mark.slow
def test_talking_in_a_browser(tmp_path: Path) -> None:
    """Needs playwright and a Chromium of this machine."""
    playwright = pytest.importorskip("playwright.sync_api")
    expect = playwright.expect
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser_path is None:
        pytest.skip("no Chromium on this machine")
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    chat = SFTTokenizer(str(FOLDER), chat_template=str(tmp_path / "chat.jinja"))
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        try:
            with served(api_key="secret") as server:
                page, problems = browser.new_page(), []
                page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
                page.on("pageerror", lambda error: problems.append(str(error)))
                page.goto(server.url)
                expect(page.locator("#state")).to_contain_text("API key")
                page.fill("#key", "secret")
                page.locator("#key").blur()
                expect(page.locator("#model")).to_have_text("small")
                assert page.locator("option[value=chat]").is_disabled()
                problems.clear()  # the refusal without a key
                page.fill("#prompt", "3 7 1")
                page.fill("#max_tokens", "5")
                page.fill("#temperature", "0")
                page.click("#send")
                expect(page.locator("#state")).to_contain_text("5 tokens in")
                written = page.locator(".turn span").nth(1).inner_text().split()
                assert len(written) == 5 and all(word.isdigit() for word in written)
                page.fill("#prompt", "<b>no number</b>")
                page.click("#send")
                page.wait_for_selector(".turn.error")
                assert "NullTokenizer" in page.locator(".turn.error span").inner_text()
                assert page.locator(".turn b b").count() == 0
                assert [text for text in problems if "400" not in text] == []
            with served(chat=chat) as server:
                page = browser.new_page()
                page.goto(server.url)
                expect(page.locator("#mode")).to_have_value("chat")
        finally:
            browser.close()
