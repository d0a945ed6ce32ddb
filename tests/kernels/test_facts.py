"""Every assertion of facts.py and resources.py can fail: a module that passes, doctored in one place each time."""

import unittest

import facts
import ptx
import resources

NAMES = {
    "statistics": "_ZN8gradclip4cuda12_GLOBAL__N_17statistics_kernelILNS_5DTypeE3ELNS0_5TermsE0EEEvNS0_11DeviceTableE",
    "scale": "_ZN8gradclip4cuda12_GLOBAL__N_12scale_kernelILNS_5DTypeE1EEEvNS0_11DeviceTableE",
    "combine": "_ZN8gradclip4cuda12_GLOBAL__N_14combine_kernelILNS_5DTypeE0EEEvNS0_12CombineTableE",
    "accumulate": "_ZN8gradclip4cuda9_GLOBAL_17accumulate_kernelILNS_5DTypeE1ELS3_3EEEvPKPSt4byteNS0_11DeviceTableE",
}
TITLES = ["statistics<bfloat16, squares>", "scale<float32>", "combine<float64>", "accumulate<float32, bfloat16>"]


def kernel(name, threads, body, declarations=""):
    return f"""
.entry {NAMES[name]}(
	.param .align 8 .b8 {NAMES[name]}_param_0[24]
)
.maxntid {threads}, 1, 1
{{
	.reg .pred 	%p<9>;
	{declarations}
{body}
	ret;

}}
"""


STATISTICS = kernel("statistics", 128, """
	bar.sync 	0;
$L__BB0_1:
	ld.global.cs.v4.u32 {%r1,%r2,%r3,%r4}, [%rd1];  // unscaled
	mul.rn.f64 	%fd1, %fd2, %fd2;
	@%p1 bra 	$L__BB0_1;

$L__BB0_2:
	ld.global.cs.v4.u32 {%r1,%r2,%r3,%r4}, [%rd2];  // scaled
	div.rn.f32 	%f1, %f2, %f3;
	{
	.reg .b32 %temp;
	mov.b64 	{%temp, %r25}, %fd39;
	}
	@%p2 bra 	$L__BB0_2;
	atom.shared.add.u32 	%r9, [%r8], 1;
	bar.sync 	0;
	st.global.f64 	[%rd9], %fd1;
""", ".shared .align 8 .b8 totals[288];")
SCALE = kernel("scale", 256, """
$L__BB1_1:
	ld.global.cs.v4.u32 {%r1,%r2,%r3,%r4}, [%rd1];
	mul.rn.f32 	%f1, %f2, %f3;
	st.global.cs.v4.u32 [%rd1], {%r1,%r2,%r3,%r4};
	@%p1 bra 	$L__BB1_1;
""")
COMBINE = kernel("combine", 256, """
	ld.global.f64 	%fd1, [%rd1];
	add.rn.f64 	%fd1, %fd1, %fd2;
	st.global.f64 	[%rd2], %fd1;
""")
ACCUMULATE = kernel("accumulate", 256, """
$L__BB3_1:
	ld.global.cs.v2.u32 {%r1,%r2}, [%rd1];
	ld.global.cs.v4.u32 {%r1,%r2,%r3,%r4}, [%rd2];
	add.rn.f32 	%f1, %f2, %f3;
	st.global.cs.v4.u32 [%rd2], {%r1,%r2,%r3,%r4};
	@!%p1 bra 	$L__BB3_1;
""")
MODULE = ".version 9.0\n.target sm_90\n.func (.param .b64 retval) declared\n(\n\t.param .b64 a\n)\n;\n" + (
    STATISTICS + SCALE + COMBINE + ACCUMULATE)


def findings(text, titles=tuple(TITLES)):
    return facts.check(ptx.parse(text), titles)


class Facts(unittest.TestCase):
    def test_the_module_passes(self):
        self.assertEqual(findings(MODULE), [])

    def doctored(self, kernel_text, old, new, expected):
        """The one finding that a change leads to."""
        self.assertIn(old, kernel_text)
        found = findings(MODULE.replace(kernel_text, kernel_text.replace(old, new, 1)))
        self.assertTrue(any(expected in sentence for sentence in found), found or "nothing was found")

    def test_a_load_of_single_elements(self):
        self.doctored(STATISTICS, "ld.global.cs.v4.u32 {%r1,%r2,%r3,%r4}, [%rd1]", "ld.global.cs.u16 %rs1, [%rd1]",
                      "vector loads")
        self.doctored(SCALE, "ld.global.cs.v4.u32 {%r1,%r2,%r3,%r4}", "ld.global.cs.v2.u32 {%r1,%r2}", "vector loads")
        self.doctored(ACCUMULATE, "ld.global.cs.v2.u32 {%r1,%r2}", "ld.global.cs.u32 %r1", "vector loads")

    def test_a_store_of_single_elements(self):
        self.doctored(SCALE, "st.global.cs.v4.u32 [%rd1], {%r1,%r2,%r3,%r4}", "st.global.cs.u32 [%rd1], %r1",
                      "vector stores")
        self.doctored(ACCUMULATE, "st.global.cs.v4.u32 [%rd2], {%r1,%r2,%r3,%r4}", "st.global.u32 [%rd2], %r1",
                      "vector stores")

    def test_a_vector_outside_of_loops(self):
        self.doctored(SCALE, "@%p1 bra", "@%p1 not_a_bra", "in no loop")

    def test_one_loop_only(self):
        self.doctored(STATISTICS, "@%p2 bra", "@%p2 not_a_bra", "1 loops over vectors")

    def test_a_generic_access(self):
        self.doctored(COMBINE, "ld.global.f64", "ld.f64", "a generic access")
        self.doctored(COMBINE, "st.global.f64", "st.f64", "a generic access")

    def test_local_memory(self):
        self.doctored(STATISTICS, ".shared .align 8 .b8 totals", ".local .align 8 .b8 __local_depot0", "is declared")
        self.doctored(COMBINE, "st.global.f64", "st.local.f64", "local memory")

    def test_a_contraction(self):
        self.doctored(COMBINE, "add.rn.f64 	%fd1, %fd1, %fd2", "fma.rn.f64 %fd1, %fd1, %fd1, %fd2",
                      "1 fused multiply-adds, expected 0")

    def test_an_approximation(self):
        self.doctored(STATISTICS, "div.rn.f32", "div.approx.f32", "1 approximations, expected 0")
        self.doctored(STATISTICS, "div.rn.f32", "div.full.f32", "not rounded to nearest even")
        self.doctored(STATISTICS, "div.rn.f32", "div.rn.ftz.f32", "subnormals flushed")
        self.doctored(COMBINE, "add.rn.f64", "add.rz.f64", "not rounded to nearest even")

    def test_an_atomic_on_a_number(self):
        self.doctored(STATISTICS, "atom.shared.add.u32", "atom.shared.add.f32", "an atomic on a floating-point number")
        self.doctored(STATISTICS, "atom.shared.add.u32", "red.shared.add.f64", "an atomic on a floating-point number")
        self.doctored(STATISTICS, "atom.shared.add.u32", "atom.global.add.u32", "an atomic outside shared memory")

    def test_barriers(self):
        self.doctored(STATISTICS, "bar.sync 	0;\n\tst", "st", "1 barriers, expected 2")
        self.doctored(COMBINE, "add.rn.f64", "bar.sync 0;\nadd.rn.f64", "1 barriers, expected 0")

    def test_threads(self):
        self.doctored(STATISTICS, ".maxntid 128", ".maxntid 256", "blocks of 256 threads, expected 128")

    def test_a_call(self):
        self.doctored(COMBINE, "add.rn.f64 	%fd1, %fd1, %fd2", "call.uni other, (param0)", "a call")

    def test_other_threads_in_a_loop(self):
        for other in ("shfl.sync.down.b32 %r1, %r2, 1, 31, -1", "atom.shared.add.u32 %r9, [%r8], 1",
                      "ld.shared.u8 %rs1, [%r8]", "ld.global.u32 %r1, [%rd7]"):
            self.doctored(SCALE, "mul.rn.f32", f"{other};\n\tmul.rn.f32", "in a loop over vectors")

    def test_kernels_that_are_missing_or_new(self):
        self.assertTrue(any("no such kernel" in sentence for sentence in facts.check(ptx.parse(MODULE))))
        self.assertTrue(any("not expected" in sentence for sentence in findings(MODULE, TITLES[:2])))

    def test_all_kernels_are_expected(self):
        self.assertEqual(len(facts.expected_titles()), 6 * 3 + 6 + 6 + 36)

    def test_text_that_cannot_be_read(self):
        for text in ("", MODULE.rstrip().rstrip("}"), MODULE.replace("ret;", "0ret;")):
            with self.assertRaises(ptx.Unreadable):
                ptx.parse(text)


LOG = f"""\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{NAMES["scale"]}' for 'sm_90'
ptxas info    : Function properties for {NAMES["scale"]}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 0 barriers
ptxas info    : Function properties for __internal_accurate_pow
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function '{NAMES["statistics"]}' for 'sm_90'
ptxas info    : Function properties for {NAMES["statistics"]}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 82 registers, used 1 barriers, 288 bytes smem
"""


class Resources(unittest.TestCase):
    def setUp(self):
        self.usages = resources.parse_log(LOG)
        self.table = resources.write_table("13.0.88", {"80": self.usages, "90": self.usages})

    def test_the_log(self):
        self.assertEqual(self.usages["scale<float32>"], resources.Usage(48, 0, 0, 0, 0))
        self.assertEqual(self.usages["statistics<bfloat16, squares>"], resources.Usage(82, 288, 1, 0, 0))
        self.assertIn("__internal_accurate_pow", self.usages)

    def test_the_table_says_what_the_log_says(self):
        self.assertEqual(resources.compare(self.usages, "13.0.88", "90", self.table), ([], ""))

    def test_other_registers(self):
        usages = resources.parse_log(LOG.replace("Used 48", "Used 49"))
        self.assertEqual(len(resources.compare(usages, "13.0.88", "90", self.table)[0]), 1)

    def test_other_shared_memory_and_barriers(self):
        for changed in (LOG.replace("288 bytes smem", "296 bytes smem"), LOG.replace("used 1 bar", "used 2 bar")):
            self.assertEqual(len(resources.compare(resources.parse_log(changed), "13.0.88", "90", self.table)[0]), 1)

    def test_spills_and_stacks_count_for_every_version(self):
        for changed in (LOG.replace("0 bytes spill stores", "8 bytes spill stores", 1),
                        LOG.replace("0 bytes stack frame", "64 bytes stack frame", 1),
                        LOG.replace("pow\n    0 bytes stack", "pow\n    16 bytes stack")):
            self.assertNotEqual(changed, LOG)
            for version in ("13.0.88", "13.1.5"):
                self.assertEqual(len(resources.compare(resources.parse_log(changed), version, "90", self.table)[0]), 1)

    def test_another_version_compares_no_registers(self):
        usages = resources.parse_log(LOG.replace("Used 48", "Used 49"))
        wrong, remark = resources.compare(usages, "13.1.5", "90", self.table)
        self.assertEqual(wrong, [])
        self.assertIn("13.1.5", remark)

    def test_kernels_that_are_missing_or_new(self):
        fewer = {"scale<float32>": self.usages["scale<float32>"]}
        self.assertEqual(len(resources.compare(fewer, "13.0.88", "90", self.table)[0]), 1)
        more = dict(self.usages, **{"scale<float64>": resources.Usage(1, 0, 0, 0, 0)})
        self.assertEqual(len(resources.compare(more, "13.0.88", "90", self.table)[0]), 1)


if __name__ == "__main__":
    unittest.main()
