"""What is no HTTP, or no clear HTTP, costs the labellers' server neither a traceback nor its service."""


def test_each_is_refused_without_a_line(served, malformed, capfd):
    running = served()
    port = running.port
    for name, request in malformed.MALFORMED.items():
        answered = malformed.statuses(malformed.send(port, request, "/api/label"))
        assert all(status < 500 for status in answered), f"{name}: {answered}"
        if name.startswith("both lengths") or "chunks in" in name or "with a line" in name:
            assert answered == [400], f"{name}: {answered}"
        for path in ("/api/label", "/", "/nothing"):
            malformed.send(port, request, path, resets=True)
    assert malformed.statuses(malformed.send(port, b"GET / HTTP/1.0\r\n\r\n", "/")) != []
    assert capfd.readouterr().err == ""
