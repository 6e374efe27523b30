"""HTTP: the endpoints of the Tinker API and of OpenAI's, and the status page."""
