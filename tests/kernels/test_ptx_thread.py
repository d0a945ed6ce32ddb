"""The interpreter behind the counts, on kernels whose results and counts are known."""

import struct
import unittest

import counts
import execution
import ptx
from ptx_thread import Memory, Unsupported, bits_of, divide, permute, run_block

NAME = "_ZN8gradclip4cuda12_GLOBAL__N_12scale_kernelILNS_5DTypeE1EEEvNS0_11DeviceTableE"

#: Multiplies the elements of one chunk by its coefficient, one thread each, a block's width apart.
MULTIPLY = f"""
.entry {NAME}(
	.param .align 8 .b8 {NAME}_param_0[24]
)
.maxntid 256, 1, 1
{{
	.reg .pred 	%p<9>;
	ld.param.u64 	%rd1, [{NAME}_param_0];
	ld.param.u64 	%rd2, [{NAME}_param_0+8];
	ld.global.u64 	%rd3, [%rd1];
	ld.global.u32 	%r1, [%rd1+8];
	ld.global.f64 	%fd1, [%rd2+16];
	cvt.rn.f32.f64 	%f1, %fd1;
	mov.u32 	%r2, %tid.x;
$L__BB0_1:
	setp.ge.u32 	%p1, %r2, %r1;
	@%p1 bra 	$L__BB0_2;
	mul.wide.u32 	%rd4, %r2, 16;
	add.s64 	%rd5, %rd3, %rd4;
	ld.global.cs.v4.u32 	{{%r3,%r4,%r5,%r6}}, [%rd5];
	mov.b32 	%f2, %r3;
	mul.rn.f32 	%f3, %f2, %f1;
	mov.b32 	%r3, %f3;
	st.global.cs.v4.u32 	[%rd5], {{%r3,%r4,%r5,%r6}};
	add.s32 	%r2, %r2, 256;
	bra.uni 	$L__BB0_1;
$L__BB0_2:
	ret;
}}
"""


class Interpreter(unittest.TestCase):
    def test_a_kernel_computes_and_is_counted(self):
        function = ptx.parse(MULTIPLY)[0]
        memory = Memory()
        elements = struct.pack("<4f", 1.5, 2.0, -3.0, 4.0)
        data = memory.place(elements)
        chunk = memory.place(struct.pack("<Q4I", data, 1, 0, 0, 0))
        table = struct.pack("<QQI4x", chunk, memory.place(counts.factors_of(coefficient=0.25)), 1)
        thread = run_block(function, memory, [table], 256)
        self.assertEqual(struct.unpack("<4f", memory.spaces["global"][data : data + 16]), (0.375, 2.0, -3.0, 4.0))
        self.assertEqual(sum(thread.executed.values()), 7 + 11 + 2)

    def test_counts_are_what_more_elements_add(self):
        function = ptx.parse(MULTIPLY.replace("mul.wide.u32 	%rd4, %r2, 16", "mul.wide.u32 	%rd4, %r2, 4")
                             .replace(".v4.u32", ".u32").replace("{%r3,%r4,%r5,%r6}", "%r3"))[0]
        executed = counts.per_element(function, counts.factors_of(coefficient=0.25))
        self.assertEqual(sum(executed.values()), 11.0)
        self.assertEqual(executed["mul.rn.f32"], 1.0)
        self.assertNotIn("cvt.rn.f32.f64", executed)

    def test_rounding(self):
        self.assertEqual(bits_of(1.0 + 2.0**-24, 32), 0x3F800000)
        self.assertEqual(bits_of(1e300, 32), 0x7F800000)
        self.assertEqual(bits_of(-1e300, 32), 0xFF800000)
        self.assertEqual(bits_of(2.0**-149, 32), 1)
        self.assertEqual(divide(-1.0, 0.0), float("-inf"))

    def test_permute(self):
        self.assertEqual(permute(0x33221100, 0x77665544, 0x7632), 0x77663322)

    def test_a_wrong_rounding_is_found(self):
        name = NAME.replace("DTypeE1E", "DTypeE3E")  # scale<bfloat16>: one element a thread
        text = (MULTIPLY.replace(NAME, name).replace("mul.wide.u32 	%rd4, %r2, 16", "mul.wide.u32 	%rd4, %r2, 2")
                .replace("ld.global.cs.v4.u32 	{%r3,%r4,%r5,%r6}, [%rd5];", "ld.global.u16 %rs1, [%rd5];\n"
                         "cvt.u32.u16 %r3, %rs1;\nshl.b32 %r3, %r3, 16;")
                .replace("st.global.cs.v4.u32 	[%rd5], {%r3,%r4,%r5,%r6};", "shr.u32 %r4, %r3, 16;\nROUND\n"
                         "cvt.u16.u32 %rs1, %r3;\nst.global.u16 [%rd5], %rs1;"))
        nearest = ("and.b32 %r4, %r4, 1;\nadd.s32 %r3, %r3, %r4;\nadd.s32 %r3, %r3, 32767;\nshr.u32 %r3, %r3, 16;")
        cases, execution.CASES = execution.CASES, [{"coefficient": 0.3}]
        self.addCleanup(setattr, execution, "CASES", cases)
        patterns = list(range(0x3000, 0x4000, 7))
        self.assertEqual(execution.check_scale(ptx.parse(text.replace("ROUND", nearest))[0], patterns), [])
        truncated = ptx.parse(text.replace("ROUND", "shr.u32 %r3, %r3, 16;"))[0]
        self.assertGreater(len(execution.check_scale(truncated, patterns)), 100)

    def test_what_it_does_not_know_it_says(self):
        with self.assertRaises((Unsupported, KeyError)):
            run_block(ptx.parse(MULTIPLY.replace("mul.rn.f32", "tanh.rn.f32"))[0], Memory(), [bytes(24)], 1)
        with self.assertRaises(Unsupported):  # an access outside of memory
            run_block(ptx.parse(MULTIPLY)[0], Memory(), [bytes(24)], 1)


if __name__ == "__main__":
    unittest.main()
