"""Annotated lines become the nested values of a receipt."""

from __future__ import annotations

from typing import Any

from vlmpack.data.archive import parse_lines


class TestParseLines:
    @staticmethod
    def line(category: str, *texts: str, group: int = 0, key: str = "", **more: int) -> dict[str, Any]:
        words = [{"text": key, "is_key": 1}] * bool(key) + [{"text": text, "is_key": 0} for text in texts]
        return {"category": category, "group_id": group, "words": words, **more}

    def test_words_are_joined_and_keys_left_out(self) -> None:
        lines = [self.line("menu.cnt", "1", "x"), self.line("total.total_price", "5,000", group=1, key="TOTAL")]
        assert parse_lines(lines) == {"menu": {"cnt": "1 x"}, "total": {"total_price": "5,000"}}

    def test_groups_become_items_and_repeated_lines_a_list(self) -> None:
        lines = [
            self.line("menu.nm", "AYAM", group=4),
            self.line("menu.nm", "BAKAR", group=4),
            self.line("menu.nm", "SUSU", group=5),
        ]
        assert parse_lines(lines) == {"menu": [{"nm": ["AYAM", "BAKAR"]}, {"nm": "SUSU"}]}

    def test_sub_groups_become_extras(self) -> None:
        lines = [
            self.line("menu.nm", "AYAM", sub_group_id=0),
            self.line("menu.sub_nm", "Telur", sub_group_id=1),
            self.line("menu.sub_price", "3,000", sub_group_id=1),
            self.line("menu.sub_nm", "Keju", sub_group_id=2),
        ]
        assert parse_lines(lines)["menu"]["sub"] == [{"nm": "Telur", "price": "3,000"}, {"nm": "Keju"}]

    def test_old_annotations_without_sub_groups_are_read(self) -> None:
        lines = [self.line("menu.sub.nm", "Telur"), self.line("menu.nm", "AYAM")]
        assert parse_lines(lines) == {"menu": {"nm": "AYAM", "sub": {"nm": "Telur"}}}

    def test_unknown_classes_are_kept(self) -> None:
        lines = [self.line("void_total.price", "1"), self.line("menu.nm", "A"), self.line("menu.new", "B")]
        assert parse_lines(lines) == {"menu": {"nm": "A", "new": "B"}, "void_total": {"price": "1"}}

    def test_a_line_of_key_words_alone_says_nothing(self) -> None:
        assert parse_lines([self.line("total.total_price", key="TOTAL")]) == {}
