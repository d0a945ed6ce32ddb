"""The sources keep the house rules, and the checks notice where one does not."""

import pathlib
import unittest

import house_rules

ROOT = pathlib.Path(__file__).resolve().parents[2]


def files_below(*tops):
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
            for top in tops for path in (ROOT / top).rglob("*") if path.suffix in house_rules.SUFFIXES}


FILES = files_below("src", "apps")


class Sources(unittest.TestCase):
    def test_are_found(self):
        self.assertIn("src/base/element.hpp", FILES)

    def test_define_a_name_once(self):
        self.assertEqual(house_rules.doubly_defined(FILES), [])

    def test_include_foreign_headers_in_their_place(self):
        self.assertEqual(house_rules.misplaced_headers(FILES), [])

    def test_have_folders_of_their_own(self):
        self.assertEqual(house_rules.shared_folders(files_below("tests")), [])


class Checks(unittest.TestCase):
    def doubles(self, second):
        return house_rules.doubly_defined({
            "a.hpp": "namespace gradclip {\n\nstruct Piece {\n};\n\n}  // namespace gradclip\n", "b.cpp": second})

    def test_notice_a_second_class(self):
        for words in ("struct Piece {", "class Piece final : public Base {", "class Piece {", "struct alignas(64) Piece {",
                      "template <typename T> struct Piece {"):
            with self.subTest(words):
                found = self.doubles(f"namespace gradclip {{\n{words}\n}};\n}}  // namespace gradclip\n")
                self.assertEqual(found, ["gradclip::Piece is defined at a.hpp:3 and at b.cpp:2"])

    def test_let_other_names_be(self):
        for text in ("namespace gradclip {\nnamespace {\nstruct Piece {\n}  // namespace\n}  // namespace gradclip\n",
                     "namespace gradclip {\nstruct Piece;\n}  // namespace gradclip\n",
                     "namespace gradclip {\nstruct Piece::State {\n}  // namespace gradclip\n",
                     "namespace gradclip {\nstruct Piece<1> {\n}  // namespace gradclip\n",
                     "namespace gradclip::cuda {\nstruct Piece {\n}  // namespace gradclip::cuda\n"):
            with self.subTest(text):
                self.assertEqual(self.doubles(text), [])

    def test_notice_a_misplaced_header(self):
        self.assertEqual(house_rules.misplaced_headers({"src/norm/a.cpp": "#include <mpi.h>\n"}),
                         ["src/norm/a.cpp includes mpi.h, which is for src/comm/mpi_communicator.cpp"])

    def test_notice_a_shared_folder(self):
        for text in ('path(testing::TempDir()) / "x"', 'open("/tmp/x")'):
            with self.subTest(text):
                self.assertEqual(len(house_rules.shared_folders({"tests/a.cpp": text})), 1)


if __name__ == "__main__":
    unittest.main()
