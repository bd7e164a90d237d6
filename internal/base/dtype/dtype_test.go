package dtype

import "testing"

func TestParse(t *testing.T) {
	for name, want := range map[string]Type{
		"bf16": BF16, "BF16": BF16, "torch.bfloat16": BF16, "float16": F16, "half": F16, "fp32": F32, "float32": F32,
		"F8_E4M3": F8E4M3, "I64": I64, "bool": Bool, "U8": U8,
	} {
		if got, err := Parse(name); err != nil || got != want {
			t.Errorf("%q is %v, %v; want %v", name, got, err, want)
		}
	}
	for _, name := range []string{"", "invalid", "int3", "torch.", "bf 16"} {
		if got, err := Parse(name); err == nil {
			t.Errorf("%q is taken for %v", name, got)
		}
	}
}

// TestEveryTypeHasANameAndSize parses the name of every type.
func TestEveryTypeHasANameAndSize(t *testing.T) {
	for typ := Bool; int(typ) < len(types); typ++ {
		if got, err := Parse(typ.String()); err != nil || got != typ || typ.Size() == 0 {
			t.Errorf("%v reads back as %v, %v; %d bytes", typ, got, err, typ.Size())
		}
	}
}
