"""The grammar of `--network`, narrowing, and the table of addresses."""

from __future__ import annotations

import ipaddress
import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_mcp.network.rules import (
    BadHost,
    HostRule,
    Rules,
    is_own,
    literal,
    plain_host,
    split_port,
    why_not_public,
)

BAD = """
0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.100.100.200 100.127.255.255 127.0.0.1
127.255.255.254 168.63.129.16 169.254.0.1 169.254.169.254 172.16.0.1 172.31.255.255 192.0.0.1
192.0.0.192 192.0.2.1 192.88.99.1 192.168.0.1 198.18.0.1 198.19.255.255 198.51.100.1 203.0.113.1
224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255
:: ::1 ::ffff:127.0.0.1 ::ffff:8.8.8.8 ::127.0.0.1 ::8.8.8.8 64:ff9b::7f00:1 64:ff9b::808:808
64:ff9b:1::a00:1 100::1 2001::1 2001:0:4136:e378:8000:63bf:3fff:fdd2 2001:2::1 2001:10::1 2001:20::1
2001:db8::1 2002:7f00:1::1 2002:a9fe:a9fe::1 2002:808:808::1 3fff::1 3fff:fff::1 4000::1 5f00::1
fc00::1 fd00:ec2::254 fe80::1 fe80::1%lo fec0::1 ff02::1 2a00:1450::5efe:7f00:1
2a00:1450::200:5efe:a9fe:a9fe
"""
GOOD = """
1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.0.0.1 128.0.0.1 168.63.129.15
168.63.129.17 169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 192.0.1.0 192.167.255.255
192.169.0.0 198.17.255.255 198.20.0.0 223.255.255.255
2000::1 2001:200::1 2001:4860:4860::8888 2003::1 2606:4700::1111 2a00:1450:4001:81b::200e 3ffe::1
"""

SPELLINGS = """
2130706433 0x7f000001 017700000001 0177.0.0.1 0x7f.0.0.1 0x7f.1 127.1 127.0.1 127.0.0.01
127.0.0.1. 1.2.3 1.2.3.4.5 256.1.1.1 example.1 example.0x1 0x 1.2.3.4.0x 127.0.0.1.. 00 999
"""


@pytest.mark.parametrize("address", BAD.split())
def test_no_name_leads_to_an_address_that_is_not_public(address: str) -> None:
    assert why_not_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", GOOD.split())
def test_public_addresses_are_public_up_to_the_edges(address: str) -> None:
    assert why_not_public(ipaddress.ip_address(address)) == ""


@given(st.ip_addresses())
def test_nothing_is_public_that_the_standard_library_knows_as_private(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    if not why_not_public(address):
        assert not address.is_private
        assert not address.is_loopback
        assert not address.is_link_local
        assert not address.is_multicast
        assert not address.is_reserved
        assert not address.is_unspecified


@given(st.ip_addresses(v=4))
def test_no_ipv4_address_hides_in_another_form(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    for prefix, shift in (
        ("::ffff:0:0", 0),
        ("::", 0),
        ("64:ff9b::", 0),
        ("64:ff9b:1::", 0),
        ("2002::", 80),
        ("2001::", 0),
        ("2a00::5efe:0:0", 0),
        ("2a00::200:5efe:0:0", 0),
    ):
        hidden = ipaddress.IPv6Address(int(ipaddress.IPv6Address(prefix)) | number << shift)
        assert why_not_public(hidden)


def test_this_machine_knows_its_own_addresses() -> None:
    assert is_own(ipaddress.ip_address("127.0.0.1"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("1.1.1.1", 9))
        except OSError:
            return  # it has no other
        own = ipaddress.ip_address(sock.getsockname()[0])
    assert is_own(own)
    assert not is_own(ipaddress.ip_address("1.1.1.1"))


@pytest.mark.parametrize(
    "host",
    SPELLINGS.split(),
)
def test_other_spellings_of_addresses_are_no_hosts(host: str) -> None:
    with pytest.raises(BadHost):
        plain_host(host)


@pytest.mark.parametrize(
    "host",
    [
        *("", ".", "a..b", "-a.b", "a-.b", "a b", "a\tb", "a\0.b", "exämple.com", "a/b", "a@b"),
        *(
            "a" * 64 + ".b",
            ".".join(["a" * 60] * 5),
            "a%41",
            "*.a",
            "*",
            "a.com..",
            "a:b",
            "::1%lo",
        ),
        *("①②⑦.⓪.⓪.①", "fe80::1%eth0", "1::2::3", "a\\b", "a,b", "[::1]"),
    ],
)
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(BadHost):
        plain_host(host)


def test_hosts_have_one_form() -> None:
    assert plain_host("Example.COM.") == "example.com"
    assert plain_host("a_b.example.com") == "a_b.example.com"
    assert plain_host("2606:4700:0::1111") == "2606:4700::1111"
    assert plain_host("8.8.8.8") == "8.8.8.8"
    assert literal("3com.example") is None


@given(st.text(max_size=40))
def test_a_host_in_its_one_form_stays_as_it_is(text: str) -> None:
    try:
        host = plain_host(text)
    except BadHost:
        return
    assert plain_host(host) == host
    assert host.isascii()


@given(st.text(alphabet="0123456789abcdefx.:[]%", max_size=24))
def test_no_host_is_an_address_for_the_system_and_a_name_here(text: str) -> None:
    try:
        host = plain_host(text)
    except BadHost:
        return
    if literal(host) is None:
        with pytest.raises(OSError, match=r"illegal|Address"):
            socket.inet_aton(host)


def test_ports_are_read_in_one_way() -> None:
    assert split_port("a:80") == ("a", 80)
    assert split_port("a") == ("a", None)
    assert split_port("[::1]:80") == ("::1", 80)
    assert split_port("[::1]") == ("::1", None)
    for text in (
        "a:",
        "a:0",
        "a:65536",
        "a:8 0",
        "a:+80",
        "a:٨٠",
        "::1",
        "[::1",
        "[a]:1",
        "[::1]80",
    ):
        with pytest.raises(BadHost):
            split_port(text)


def test_entries_are_read_as_people_write_them() -> None:
    rules = Rules.parse([" Example.com , *.Example.ORG.", "db.example.com:5432", "straße.de"])
    assert str(rules) == "example.com, *.example.org, db.example.com:5432, xn--strae-oqa.de"
    assert [each.exact for each in rules.rules] == [False, False, True, False]
    assert str(Rules.parse(["[2606:4700::1111]:443,10.0.0.5:5432"])) == (
        "[2606:4700::1111]:443, 10.0.0.5:5432"
    )
    assert not Rules.parse(["none"])
    assert not Rules.parse([])
    assert str(Rules.parse([])) == "none"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("none,example.com", "alone"),
        ("*:22", "80 and 443"),
        ("a*.example.com", "name of a host"),
        ("*.8.8.8.8", "below an address"),
        ("10.0.0.1", "port"),
        ("127.0.0.1", "port"),
        ("169.254.169.254:80", "metadata"),
        ("168.63.129.16:80", "metadata"),
        ("192.0.0.192:80", "metadata"),
        ("0.0.0.0:80", "this host"),
        ("[::ffff:127.0.0.1]:80", "IPv4"),
        ("[fe80::1]:80", "link-local"),
        ("224.0.0.1:80", "multicast"),
        ("2130706433:80", "IPv4"),
        ("localhost:8080", "name the address"),
        ("x.localhost", "name the address"),
        ("https://example.com", "port"),
        ("example.com/path", "name of a host"),
        ("example.com:http", "port"),
        (",".join(f"h{number}.example.com" for number in range(300)), "entries"),
        (",".join(f"h{number}.example.com:1" for number in range(60)), "entries"),
    ],
)
def test_what_cannot_be_permitted_is_refused_in_words(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Rules.parse([text])


def permitted(rules: Rules, host: str, port: int) -> bool:
    return rules.rule_for(host, port) is not None


def test_names_are_permitted_on_the_ports_of_the_web() -> None:
    rules = Rules.parse(["example.com,*.example.org,*.example.net:8443"])
    assert permitted(rules, "example.com", 80)
    assert permitted(rules, "example.com", 443)
    assert not permitted(rules, "example.com", 22)
    assert not permitted(rules, "www.example.com", 443)
    assert permitted(rules, "a.b.example.org", 443)
    assert not permitted(rules, "example.org", 443)
    assert not permitted(rules, "xexample.org", 443)
    assert permitted(rules, "a.example.net", 8443)
    assert not permitted(rules, "a.example.net", 443)
    assert not permitted(rules, "8.8.8.8", 443)


def test_a_star_is_for_names_and_no_address() -> None:
    rules = Rules.parse(["*"])
    assert permitted(rules, "example.com", 443)
    assert not permitted(rules, "example.com", 8080)
    assert not permitted(rules, "8.8.8.8", 443)
    assert not permitted(rules, "2606:4700::1111", 443)
    assert permitted(Rules.parse(["*,8.8.8.8"]), "8.8.8.8", 443)


def test_an_exact_entry_goes_before_others() -> None:
    rules = Rules.parse(["*.example.com:5432,db.example.com:5432"])
    assert rules.rule_for("db.example.com", 5432) == HostRule("db.example.com", (5432,), True)
    assert rules.rule_for("x.example.com", 5432) == HostRule("*.example.com", (5432,))


@pytest.mark.parametrize(
    ("own", "asked", "found"),
    [
        ("*", "example.com", "example.com"),
        ("*", "*.example.com", "*.example.com"),
        ("*", "*", "*"),
        ("*", "example.com:443", "example.com:443"),
        ("*.example.com", "a.b.example.com", "a.b.example.com"),
        ("*.example.com", "*.b.example.com", "*.b.example.com"),
        ("*.example.com", "*.example.com", "*.example.com"),
        ("example.com,db.example.com:5432", "db.example.com:5432", "db.example.com:5432"),
        ("example.com:443", "example.com", "example.com:443"),
        ("example.com,example.com:443", "example.com", "example.com:443, example.com"),
        ("example.com", "none", "none"),
        ("10.0.0.5:5432", "10.0.0.5:5432", "10.0.0.5:5432"),
    ],
)
def test_a_session_may_ask_for_less(own: str, asked: str, found: str) -> None:
    assert str(Rules.parse([own]).narrowed([asked])) == found


@pytest.mark.parametrize(
    ("own", "asked"),
    [
        ("none", "example.com"),
        ("example.com", "*"),
        ("*.example.com", "*"),
        ("*.example.com", "example.com"),
        ("*.b.example.com", "*.example.com"),
        ("example.com", "www.example.com"),
        ("example.com", "example.com:22"),
        ("*", "example.com:22"),
        ("*", "8.8.8.8"),
        ("*", "127.0.0.1:80"),
        ("10.0.0.5:5432", "10.0.0.5:5433"),
        ("example.com", "xn--exmple-cua.com"),
    ],
)
def test_no_session_gets_more_than_the_operator_gave(own: str, asked: str) -> None:
    with pytest.raises(ValueError, match="does not permit"):
        Rules.parse([own]).narrowed([asked])


def test_narrowing_makes_no_place_exact_that_was_not() -> None:
    [entry] = Rules.parse(["*,example.com"]).narrowed(["example.com:443"]).rules
    assert entry == HostRule("example.com", (443,), exact=False)


ENTRIES = """
* *.a.b *.x.a.b a.b x.a.b a.b:22 x.a.b:443 *.b:22 a.c 8.8.8.8:443 10.0.0.1:22 *.a.b:443 a.b:443
8.8.8.8
"""
entries = st.sampled_from(ENTRIES.split())


@given(st.lists(entries, max_size=4), st.lists(entries, max_size=4))
def test_narrowed_rules_never_permit_more(own: list[str], asked: list[str]) -> None:
    rules = Rules.parse(own)
    try:
        narrowed = rules.narrowed(asked)
    except ValueError:
        return
    wanted = Rules.parse(asked)
    for host in ("a.b", "x.a.b", "y.x.a.b", "z.b", "a.c", "q.z", "8.8.8.8", "10.0.0.1"):
        for port in (22, 80, 443):
            entry = narrowed.rule_for(host, port)
            if entry is not None:
                held = rules.rule_for(host, port)
                assert held is not None
                assert wanted.rule_for(host, port) is not None
                assert held.exact or not entry.exact


@given(st.lists(entries, max_size=6))
def test_rules_come_back_from_their_message(words: list[str]) -> None:
    rules = Rules.parse(words)
    assert Rules.from_json(json.loads(json.dumps(rules.to_json()))) == rules


def test_who_names_an_address_of_a_page_is_told_to_name_its_host() -> None:
    with pytest.raises(ValueError, match="name the host alone"):
        Rules.parse(("https://api.example.com/v1",))
