"""The gate of AITER's fused all-reduce: token counts worked out by hand from the kernels, release by release."""

from __future__ import annotations

from itertools import product

import pytest
from standin import RELEASES

from layerfuse.fusion.backends.aiter.releases import ReleaseRange
from layerfuse.fusion.backends.aiter.stages import stages

ONE_STAGE = {
    # ranks do not wait at the end before v0.1.19.post1
    ("v0.1.16.post6", 7168, 8): 0,
    ("v0.1.19", 7168, 8): 0,
    # 128 * 7168 * 2 bytes for all ranks together
    ("v0.1.19.post1", 7168, 8): 16,
    ("v0.1.20", 7168, 2): 64,
    ("v0.1.20", 7168, 4): 32,
    ("v0.1.20", 512, 8): 224,
    ("v0.1.20.post1", 2880, 4): 79,
    ("v0.1.20.post1", 8200, 2): 0,
}


@pytest.mark.parametrize("case", ONE_STAGE, ids=lambda case: " ".join(map(str, case)))
def test_one_stage(case):
    release, width, ranks = case
    assert stages(width, 2, ranks, release).one_stage == ONE_STAGE[case]


TWO_STAGES = {
    ("v0.1.20", 7168, 8): (4681, "AITER's limit of under 64 MiB"),
    ("v0.1.16.post3", 2880, 8): (11650, "under 64 MiB"),
    ("v0.1.20", 504, 2): (0, "a row is 63 packs of 16 bytes, and 64 to 2048 are taken"),
    ("v0.1.20", 512, 2): (65535, "under 64 MiB"),
    ("v0.1.20", 16384, 2): (2047, "under 64 MiB"),
    ("v0.1.20", 16392, 2): (0, "a row is 2049 packs"),
    ("v0.1.20", 2888, 2): (0, "361 packs of 16 bytes do not divide among 2 ranks"),
    ("v0.1.20", 2896, 4): (0, "362 packs of 16 bytes do not divide among 4 ranks"),
}


@pytest.mark.parametrize("case", TWO_STAGES, ids=lambda case: " ".join(map(str, case)))
def test_two_stages(case):
    release, width, ranks = case
    found = stages(width, 2, ranks, release)
    most, words = TWO_STAGES[case]
    assert found.two_stage == most
    assert words in found.reason


def test_what_is_quantised_has_ladders_of_its_own():
    assert stages(7168, 2, 8, "v0.1.20", kind="token").one_stage == 9, "128 KiB"
    assert stages(7168, 2, 8, "v0.1.20", kind="token").two_stage == 4 * 1024 * 1024 // 14336
    assert stages(7168, 2, 2, "v0.1.20", kind="group").one_stage == 9
    assert stages(7168, 2, 2, "v0.1.20", kind="group").two_stage == 4681
    assert stages(2880, 2, 8, "v0.1.20", kind="token").one_stage == 22
    gpt_oss = stages(2880, 2, 8, "v0.1.20", kind="token")
    assert gpt_oss.two_stage == 0
    assert "360 packs of 16 bytes, and those that fill no warp of 32" in gpt_oss.reason
    assert stages(16384, 2, 8, "v0.1.20", kind="group").most == 0


def test_padding_counts_for_the_threads_of_one_stage():
    assert stages(8000, 2, 8, "v0.1.20", kind="pad", padded_width=8192).one_stage == 14
    wide = stages(8000, 2, 8, "v0.1.20", kind="pad", padded_width=8200)
    assert (wide.one_stage, wide.two_stage) == (0, 4194)
    assert stages(2880, 2, 8, "v0.1.20", kind="pad", padded_width=2872).most == 0
    assert stages(2880, 2, 8, "v0.1.20", kind="pad", padded_width=2881).most == 0


def test_what_no_release_takes():
    assert stages(2880, 2, 6, "v0.1.20").reason == "the kernels take 2, 4 and 8 ranks, not 6"
    assert stages(2880, 2, 1, "v0.1.20").most == 0
    assert "float16 and bfloat16" in stages(2880, 8, 8, "v0.1.20").reason
    assert stages(2880, 4, 8, "v0.1.20").one_stage == 19, "720 packs of float32"
    assert stages(2880, 4, 8, "v0.1.20", kind="group").most == 0
    assert stages(2884, 2, 8, "v0.1.20").reason == "rows of 2884 elements are no whole packs of 16 bytes"


def test_what_layerfuse_does_not_do_though_aiter_would():
    racing = stages(7168, 2, 8, "v0.1.19")
    assert (racing.one_stage, racing.two_stage) == (0, 4681)
    assert "a rank may overwrite its input while another still reads it" in racing.reason


def test_of_several_releases_what_is_true_of_all():
    for width, ranks in product((2880, 7168), (2, 4, 8)):
        together = stages(width, 2, ranks, ReleaseRange("v0.1.16.post5", "v0.1.20"))
        each = [stages(width, 2, ranks, release) for release in ReleaseRange("v0.1.16.post5", "v0.1.20")]
        assert together.one_stage == min(one.one_stage for one in each)
        assert together.two_stage == min(one.two_stage for one in each)
    whole = stages(7168, 2, 4, ReleaseRange())
    assert (whole.one_stage, whole.two_stage) == (0, 4681), "not before v0.1.19.post1, and so not at all"


def test_of_an_amount_of_tokens():
    found = stages(7168, 2, 4, "v0.1.20")
    assert [found.of(tokens) for tokens in (1, 32, 33, 4681, 4682)] == [1, 1, 2, 2, 0]
    narrow = stages(256, 2, 2, "v0.1.20")
    assert [narrow.of(tokens) for tokens in (1, narrow.one_stage, narrow.one_stage + 1)] == [1, 1, 0]
    assert narrow.most == narrow.one_stage


def test_every_release_is_known_and_another_is_an_error():
    assert all(isinstance(stages(7168, 2, 8, release).most, int) for release in RELEASES)
    with pytest.raises(ValueError, match=r"a release 'v0.2' of AITER; give one from v0.1.16.post3 to v0.1.20.post1"):
        stages(7168, 2, 8, "v0.2")
