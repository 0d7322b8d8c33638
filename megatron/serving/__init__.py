"""Serving a model over HTTP: requests and answers in OpenAI's form, a thread that writes texts, a page."""
