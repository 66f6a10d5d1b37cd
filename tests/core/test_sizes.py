import pytest

from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.core.sizes import format_size, parse_size


@pytest.mark.parametrize(
    "text, size",
    [
        ("123", 123),
        (123, 123),
        ("24GB", 24 * 10**9),
        ("24gb", 24 * 10**9),
        (" 24 GB ", 24 * 10**9),
        ("24G", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("4000MiB", 4000 * 2**20),
        ("1.5GB", 1_500_000_000),
        (".5kB", 500),
        ("2T", 2 * 10**12),
        ("7 B", 7),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "0GB",
        "-1",
        "-1GB",
        "20%",
        "nan",
        "inf",
        "1e9",
        "1,5GB",
        "GB",
        "12 parsecs",
        "9" * 31,
        "9" * 5000,
        "9" * 400 + ".0GB",
        "1..2GB",
        "٣GB",
        "0.1",
        True,
        -5,
        0,
    ],
)
def test_what_is_not_a_size(text):
    with pytest.raises(UsageError) as error:
        parse_size(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "size, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (10_616_832, "10.6 MB"),
        (127_742_902_272, "127.7 GB"),
        (7_983_857_664, "7.98 GB"),
        (999_999, "1.00 MB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_format(size, text):
    assert format_size(size) == text
