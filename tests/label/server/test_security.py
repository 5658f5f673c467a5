"""S rows: other sites, other names, other people, other roles, too much. Every refusal leaves things as they were."""

import http.client
import json
import socket

import pytest

from heedful.apps.label.server.app import (
    ANYONE,
    API,
    EVERYBODY,
    LABELLERS,
    OWNERS,
    READERS,
    SMALL,
    RateLimit,
    RouteRule,
    all_rules,
)

from heedful.apps.label.server import security  # isort: skip

PAIR = {"preferred": 0, "strength": 3, "both_bad": False}
HOSTS = (
    *("evil.example", "evil.example:80", "127.0.0.1.evil.example", "0.0.0.0", "192.0.2.7", "[::ffff:192.0.2.7]", ""),
    *("evil@127.0.0.1", "evil:pw@localhost:80", "127.0.0.1/x", "127.0.0.1?x", "127.0.0.1#x", "127.0.0.1:x", "[::1]x"),
    *("evil.example@localhost", "localhost,evil.example", "127.0.0.1:99999999"),
)
PATHS = (
    *("/static/../../records.py", "/static/%2e%2e/%2e%2e/records.py", "/static/..%2f..%2frecords.py"),
    *("/static//etc/passwd", "/static/", "/static", "/static/words/../../../records.py", "/static/words/en.json%00.js"),
    *("/etc/passwd", "//evil.example/", "/events.sqlite", "/journal.jsonl", "/API/me", "/api/me/", "/./"),
    "/static/\\..\\..\\records.py",
)
XSS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "javascript:alert(1)",
    "{{7*7}} {% print(7*7) %} ${7*7}",
    "</textarea><script>alert(1)</script>",
    "![a](http://beacon.example/x.png) [b](javascript:alert(1)) <a href=//evil.example>c</a>",
    "\u202e\u2066gnp.exe\u2069 \u2028\u0000'\"><",
]


def label_body(client, **more):
    return {"nonce": "n" * 12, **client.shown(), "answer": PAIR, "seconds": 1.5, "comment": "", "flags": [], **more}


def nothing_labelled(server):
    return [event for event in server.project.events() if event.kind in ("label", "skip", "retract")] == []


class TestOtherSites:
    def test_every_post_of_another_origin_is_refused(self, served, pair_item):
        server = served([pair_item(0)])
        ada = server.signed_in("Ada", "owner")
        body = label_body(ada)
        for rule in API:
            if rule.method == "POST":
                for origin in ("http://evil.example", "null", f"http://localhost:{server.port + 1}", "file://"):
                    answer = ada.post(rule.path, body, Origin=origin)
                    assert answer.status == 403, (rule.path, origin)
                    assert "pages of other sites" in answer.error
        assert nothing_labelled(server)
        assert ada.post("/api/label", body).status == 200

    def test_what_a_form_or_a_page_of_another_site_can_send_is_refused(self, served, pair_item):
        """Other kinds of content, fetch metadata of other sites, and no token of the session or one of another."""
        server = served([pair_item(0)])
        ada, eve = server.signed_in("Ada"), server.signed_in("Eve")
        body = label_body(ada)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            assert ada.post("/api/label", body, **{"Content-Type": kind, "Origin": None}).status == 415
        for site in ("cross-site", "same-site", "none"):
            assert ada.post("/api/label", body, **{"Sec-Fetch-Site": site}).status == 403
        for token in ("", "x", "0" * 64, eve.csrf, None):
            assert ada.post("/api/label", body, **{"X-CSRF-Token": token}).status == 403
        assert nothing_labelled(server)

    def test_a_name_that_is_rebound_to_this_machine_is_refused(self, served):
        ada = served().signed_in("Ada", "owner")
        for path in ("/", "/join", "/api/me", "/static/words/en.json", "/nothing"):
            for host in HOSTS if path == "/" else HOSTS[:1]:
                answer = ada.get(path, Host=host)
                assert (answer.status, b"Ada" in answer.bytes) == (421, False), (path, host)

    def test_a_name_that_is_meant_is_answered(self, served):
        server = served(options={"allowed_hosts": ("Label-Box",)})
        assert server.anonymous().get("/join", Host="label-box:80").status == 200
        assert server.anonymous().get("/join", Host=f"[::1]:{server.port}").status == 200

    def test_behind_tls_only_pages_of_https_are_its_own_and_cookies_are_secure(self, served, pair_item):
        server = served([pair_item(0)], options={"public_url": "https://label.example.org"})
        person = server.project.add_person("Ada", "annotator")
        token = {"token": server.project.invite(person.person_id)}
        there = {"Host": "label.example.org"}
        ada = server.anonymous()
        assert ada.post("/api/join", token, Origin="http://label.example.org", **there).status == 403
        answer = ada.post("/api/join", token, Origin="https://label.example.org", **there)
        assert answer.status == 200
        assert "; Secure" in answer.headers["Set-Cookie"]

    def test_no_answer_lets_other_sites_read(self, served):
        server = served()
        ada = server.signed_in("Ada", "owner")
        for path in ("/api/me", "/", "/static/words/en.json"):
            headers = ada.get(path, Origin=f"http://127.0.0.1:{server.port}").headers
            assert not [name for name in headers if name.lower().startswith("access-control")]
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert ada.ask("OPTIONS", "/api/label").status == 405


class TestSessions:
    def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(self, served):
        server = served()
        person = server.project.add_person("Ada", "annotator")
        token = {"token": server.project.invite(person.person_id)}
        cookie = server.anonymous().post("/api/join", token).headers["Set-Cookie"]
        parts = {part.strip() for part in cookie.split(";")}
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= parts
        assert not {"Secure", "Domain"} & {part.partition("=")[0] for part in parts}
        again = server.anonymous().post("/api/join", token)
        assert (again.status, "Set-Cookie" in again.headers) == (401, False), "a link works once"

    def test_nothing_but_the_sign_in_is_there_without_a_session(self, served):
        server = served()
        server.app.unknown = RateLimit(1e9, 1e9)
        name, client = server.site.access.cookie, server.anonymous()
        for rule in all_rules():
            if rule.allows is not ANYONE:
                for cookie in (None, f"{name}=guessed", f'{name}="', "=;;")[: 4 if rule.path == "/api/me" else 2]:
                    answer = client.ask(rule.method, rule.path, {} if rule.method == "POST" else None, Cookie=cookie)
                    assert answer.status == (401 if rule.path.startswith("/api/") else 303), (rule.path, cookie)

    def test_ended_and_expired_sessions_are_none(self, served):
        server = served()
        ada = server.signed_in("Ada")
        assert ada.get("/api/me").status == 200
        assert ada.post("/api/leave").status == 200
        assert ada.get("/api/me").status == 401
        person, name = ada.person.person_id, ada.cookie.partition("=")[0]
        for hours, status in ((0.01, 200), (0.0, 401)):
            ada.cookie = f"{name}={server.project.redeem(server.project.invite(person), hours=hours)}"
            assert ada.get("/api/me").status == status
            assert server.anonymous().join(server.project.invite(person, hours=hours)).status == status

    def test_guessing_links_is_slowed_down_and_written_down(self, served):
        server = served()
        eve = server.anonymous()
        statuses = [eve.post("/api/join", {"token": f"guess-{i}"}).status for i in range(15)]
        assert statuses[:10] == [401] * 10
        assert statuses[10:] == [429] * 5
        lines = [json.loads(line) for line in (server.folder / "audit.jsonl").read_text(encoding="utf-8").splitlines()]
        assert [line["what"] for line in lines] == ["refused"] * 10
        assert "guess-1" not in (server.folder / "audit.jsonl").read_text(encoding="utf-8")

    def test_a_new_link_ends_the_persons_other_sessions(self, served):
        """Whoever has lost a browser asks for a new link, and whoever has found it is signed out at once."""
        server = served()
        owner, ada, bob = server.signed_in("王芳", "owner"), server.signed_in("Ada"), server.signed_in("Bob")
        link = owner.post("/api/people", {"person": ada.person.person_id, "invite": True}).json["link"]
        assert ada.get("/api/me").status == 401
        found, again = server.anonymous(), server.anonymous()
        assert found.join(link.partition("#")[2]).status == 200
        assert again.join(server.project.invite(ada.person.person_id)).status == 200
        assert [one.get("/api/me").status for one in (ada, found, again, bob)] == [401, 401, 200, 200]
        link = owner.post("/api/people", {"person": owner.person.person_id, "invite": True}).json["link"]
        assert owner.get("/api/me").status == 200, "who asks for their own has still to read it"
        assert server.anonymous().join(link.partition("#")[2]).status == 200
        assert owner.get("/api/me").status == 401

    def test_guessing_sessions_is_slowed_down_and_locks_nobody_out(self, served):
        server = served()
        ada, eve = server.signed_in("Ada"), server.anonymous()
        statuses = [eve.get("/api/me", Cookie=f"{server.site.access.cookie}={i}").status for i in range(15)]
        assert statuses == [401] * 10 + [429] * 5
        assert ada.get("/api/me").status == 200
        token = server.project.invite(server.project.add_person("Bob", "annotator").person_id)
        assert server.anonymous().join(token).status == 200, "sessions that have ended keep nobody from signing in"

    def test_no_token_is_in_the_folder(self, served):
        server = served()
        person = server.project.add_person("Ada", "annotator")
        token = server.project.invite(person.person_id)
        client = server.anonymous()
        client.join(token)
        session = client.cookie.partition("=")[2]
        for file in server.folder.rglob("*"):
            if file.is_file():
                content = file.read_bytes()
                assert token.encode() not in content, file
                assert session.encode() not in content, file

    def test_only_a_proxy_on_this_machine_says_who_asks(self, tmp_path):
        behind = security.access_of(tmp_path, "127.0.0.1", (), "https://label.example.org")
        alone = security.access_of(tmp_path, "127.0.0.1", (), None)
        said = {"x-forwarded-for": "203.0.113.9, 198.51.100.7"}
        assert security.client_address(said, "127.0.0.1", behind) == "198.51.100.7"
        assert security.client_address(said, "203.0.113.1", behind) == "203.0.113.1"
        assert security.client_address(said, "127.0.0.1", alone) == "127.0.0.1"
        assert security.client_address({"x-forwarded-for": "nonsense\n"}, "127.0.0.1", behind) == "127.0.0.1"


class TestRoles:
    def test_every_route_says_who_may_ask(self):
        for rule in all_rules():
            assert rule.allows in (ANYONE, EVERYBODY, LABELLERS, OWNERS, READERS), rule.path
            if rule.allows is ANYONE:
                assert rule.path.startswith("/static/") or rule.path in ("/join", "/api/join"), rule.path

    @pytest.mark.parametrize("role", ["owner", "annotator", "viewer"])
    def test_the_whole_matrix(self, served, pair_item, role):
        """What a role may not ask for is 403, what it may is never that, nor 401."""
        server = served([pair_item(0)])
        client = server.signed_in("Ada", role)
        server.app.costly = RateLimit(1e9, 1e9)
        for rule in sorted(all_rules(), key=lambda rule: rule.path == "/api/leave"):
            answer = client.ask(rule.method, rule.path, {} if rule.method == "POST" else None)
            may = rule.allows is ANYONE or role in rule.allows
            if rule.path == "/api/join":
                assert answer.status == 422
            else:
                assert (answer.status == 403) == (not may), (rule.method, rule.path, answer.status)
                assert answer.status not in (401, 404, 405, 500), rule.path

    def test_a_role_is_looked_up_with_every_request(self, served):
        server = served()
        owner, ada = server.signed_in("Olga", "owner"), server.signed_in("Ada")
        assert ada.get("/api/people").status == 403
        owner.post("/api/people", {"person": ada.person.person_id, "role": "owner"})
        assert ada.get("/api/people").status == 200
        owner.post("/api/people", {"person": ada.person.person_id, "role": "viewer"})
        assert ada.get("/api/people").status == 403
        owner.post("/api/people", {"person": ada.person.person_id, "standing": "removed"})
        assert ada.get("/api/me").status == 401

    def test_items_of_others_are_out_of_reach(self, served, pair_item):
        server = served([pair_item(i) for i in range(2)])
        ada, bob = server.signed_in("Ada"), server.signed_in("Bob")
        body = label_body(bob)
        assert label_body(ada)["item"] != body["item"]
        assert ada.post("/api/label", body).status == 409
        shown = {"item": body["item"], "assignment": body["assignment"]}
        assert ada.post("/api/skip", {"nonce": "m" * 12, **shown, "reason": "", "flags": []}).status == 409
        assert ada.post("/api/draft", {**shown, "draft": {"answer": {}}}).status == 409
        assert nothing_labelled(server)
        assert bob.get("/api/next").json["item"]["draft"] is None


class TestTexts:
    def test_what_people_and_models_write_comes_back_as_it_is_and_as_json(self, served, pair_item):
        server = served([pair_item(i) for i in range(len(XSS))])
        ada = server.signed_in(XSS[0][:50], "owner")
        for i, text in enumerate(XSS):
            body = label_body(ada, nonce=f"nonce-{i:08}", comment=text)
            assert ada.post("/api/label", body).status == 200
            assert server.project.labels()[-1].event.content["comment"] == text
        for path in ("/api/me", "/api/people", "/api/next", "/api/stats"):
            answer = ada.get(path)
            assert answer.status == 200, answer.error
            assert answer.headers["Content-Type"] == "application/json"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"

    def test_no_page_holds_anything_of_the_project(self, served, pair_item):
        """Pages are the same bytes for everybody: there is nothing in them to escape."""
        first, second = served([pair_item(0)]), served([pair_item(1)])
        ada, eve = first.signed_in(XSS[0], "owner"), second.signed_in("Eve", "owner")
        for path in ("/", "/people", "/import", "/export", "/rounds", "/instructions", "/stats", "/join"):
            assert ada.get(path).bytes == eve.get(path).bytes

    def test_pages_have_no_script_or_style_in_them_and_a_strict_policy(self, served):
        ada = served().signed_in("Ada", "owner")
        for rule in all_rules():
            if rule.method == "GET" and not rule.path.startswith("/api/"):
                answer = ada.get(rule.path)
                policy = answer.headers["Content-Security-Policy"]
                assert policy == security.CONTENT_POLICY
                assert "unsafe" not in policy
                if answer.headers["Content-Type"].startswith("text/html"):
                    page = answer.bytes.decode()
                    assert [one for one in ("<style", " style=", " onclick", "://") if one in page] == []
                    assert [part for part in page.split("<script")[1:] if "src=" not in part.partition(">")[0]] == []


class TestTooMuch:
    def test_a_body_is_an_object_of_at_most_a_megabyte(self, served, pair_item):
        """With a length or without."""
        server = served([pair_item(0)])
        ada = server.signed_in("Ada")
        sent = label_body(ada)
        assert ada.post("/api/label", {**sent, "comment": "x" * SMALL}).status == 413
        assert ada.post("/api/label", b" " * 2000, **{"Content-Length": str(10**12)}).status == 413
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        headers = {"Cookie": ada.cookie, "X-CSRF-Token": ada.csrf, "Content-Type": "application/json"}
        pieces = (b"x" * 100_000 for _ in range(50))
        connection.request("POST", "/api/label", body=pieces, headers=headers, encode_chunked=True)
        with connection.getresponse() as answer:
            assert answer.status == 413
        connection.close()
        assert ada.post("/api/label", b"").status == 422
        for body, said in (
            *((body, "a JSON object") for body in (b"[]", b"1")),
            *((body, "not JSON") for body in (b"{", b"\xff", b"[" * 5000)),
            *((b'{"a": 1, "a": 2}', "twice"), (b'{"a": NaN}', "NaN")),
        ):
            answer = ada.post("/api/label", body)
            assert (answer.status, said in answer.error) == (400, True), body
        answer = ada.post("/api/label", json.dumps(sent).replace('"comment": ""', '"comment": "\\ud800"').encode())
        assert (answer.status, "surrogate" in answer.error) == (422, True)
        assert nothing_labelled(server)

    def test_one_person_may_not_ask_without_end(self, served):
        server = served()
        ada, bob = server.signed_in("Ada"), server.signed_in("Bob")
        server.app.by_person = RateLimit(per_second=0.5, burst=20)
        statuses = [ada.get("/api/me").status for _ in range(40)]
        assert statuses[:20] == [200] * 20
        assert 429 in statuses
        assert bob.get("/api/me").status == 200
        assert ada.get("/api/me").headers["Retry-After"].isdigit()

    def test_rate_limits_forget_who_is_gone(self, monkeypatch):
        monkeypatch.setattr(security, "MOST_KEYS", 10)
        limit = RateLimit(per_second=0.001, burst=1)
        for i in range(100):
            assert limit.seconds_to_wait(str(i)) == 0
        assert len(limit._left) == 10
        assert limit.seconds_to_wait("99") > 0

    def test_a_client_that_sends_nothing_holds_nobody_up(self, served):
        server = served()
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
        for one in silent:
            one.sendall(b"POST /api/join HTTP/1.1\r\nHost: ")
        assert server.anonymous().get("/join").status == 200
        for one in silent:
            with one, pytest.raises(BlockingIOError):  # all of them are waited for still
                one.recv(1, socket.MSG_DONTWAIT)


class TestPaths:
    def test_only_what_is_in_the_table_is_there(self, served):
        ada = served().signed_in("Ada", "owner")
        for path in PATHS:
            answer = ada.get(path)
            assert (answer.status, answer.error) == (404, "there is no such page"), path

    def test_names_of_people_are_only_names(self, served):
        server = served()
        owner = server.signed_in("Olga", "owner")
        before = sorted(server.folder.iterdir())
        for name in ("../../x", "/etc/passwd", "C:\\x", "a\u0000b", "..", "con", "=cmd()", "名 \u202e"):
            assert owner.post("/api/people", {"name": name, "role": "annotator"}).status == 200
        assert sorted(set(server.folder.iterdir()) - set(before)) == []
        assert not (server.folder.parent.parent / "x").exists()

    def test_a_method_that_is_not_meant_is_405(self, served):
        ada = served().signed_in("Ada", "owner")
        for asked in ("POST /api/me", "GET /api/label", "PUT /api/label", "DELETE /api/people", "TRACE /"):
            method, path = asked.split()
            assert ada.ask(method, path, {} if method != "GET" else None).status == 405, asked


def test_a_mistake_of_ours_says_nothing_of_the_machine(served, capsys):
    def broken(site, asked):
        raise RuntimeError("/secret/path of the machine")

    server = served(options={"rules": (RouteRule("GET", "/broken", ANYONE, broken),)})
    answer = server.anonymous().get("/broken")
    assert answer.status == 500
    assert b"secret" not in answer.bytes
    assert answer.headers["Content-Security-Policy"] == security.CONTENT_POLICY
    assert "/secret/path" in capsys.readouterr().err


def test_a_file_that_the_browser_has_is_not_sent_again(served):
    client = served().anonymous()
    first = client.get("/static/words/zh.json")
    again = client.get("/static/words/zh.json", **{"If-None-Match": first.headers["ETag"]})
    assert (first.status, again.status, again.bytes) == (200, 304, b"")
    assert again.headers["Content-Security-Policy"] == security.CONTENT_POLICY
    assert client.get("/static/words/en.json", **{"If-None-Match": first.headers["ETag"]}).status == 200


def test_an_audit_that_cannot_be_written_keeps_nobody_out(served, capsys):
    server = served()
    (server.folder / "audit.jsonl").mkdir()
    ada = server.signed_in("Ada")
    assert ada.get("/api/me").status == 200
    assert "signed in" in capsys.readouterr().err
