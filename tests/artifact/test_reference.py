"""The API reference has a page for every module, or says why not."""

from specter_lab.artifact import house, reference


def test_every_module_has_a_page_or_a_reason(tmp_path):
    left_out = reference.write_reference(tmp_path / "docs")
    names = reference.module_names()
    assert len(names) == len(set(names)) == len(house.modules())
    for name in names:
        page = (tmp_path / "docs" / name.replace(".", "/")).with_suffix(".html")
        assert page.exists() == (name not in left_out), name
    assert all("No module named" in why for why in left_out.values())
    assert not [name for name in left_out if name.split(".")[1] not in ("compress", "engine")]
    policy = (tmp_path / "docs" / "specter_lab" / "plan" / "policy.html").read_text(encoding="utf-8")
    assert "What a policy may know before it runs." in policy
    assert (tmp_path / "docs" / "index.html").exists()
