// Package dtype names the element types of tensors and their sizes.
package dtype

import (
	"fmt"
	"strings"
)

// Type is the element type of a tensor.
type Type uint8

// The element types of model files and training recipes. Invalid is the zero
// value, so that a forgotten type is noticed.
const (
	Invalid Type = iota
	Bool
	U8
	I8
	F8E4M3
	F8E5M2
	U16
	I16
	F16
	BF16
	U32
	I32
	F32
	U64
	I64
	F64
)

var types = [...]struct {
	name string
	size int64
}{
	Invalid: {"invalid", 0},
	Bool:    {"bool", 1},
	U8:      {"uint8", 1},
	I8:      {"int8", 1},
	F8E4M3:  {"fp8_e4m3", 1},
	F8E5M2:  {"fp8_e5m2", 1},
	U16:     {"uint16", 2},
	I16:     {"int16", 2},
	F16:     {"fp16", 2},
	BF16:    {"bf16", 2},
	U32:     {"uint32", 4},
	I32:     {"int32", 4},
	F32:     {"fp32", 4},
	U64:     {"uint64", 8},
	I64:     {"int64", 8},
	F64:     {"fp64", 8},
}

// Size returns the number of bytes of one element.
func (t Type) Size() int64 { return types[t].size }

// String returns the short name of flags and reports, such as "bf16".
func (t Type) String() string { return types[t].name }

// MarshalText returns the short name.
func (t Type) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// UnmarshalText parses any name that [Parse] takes.
func (t *Type) UnmarshalText(text []byte) (err error) {
	*t, err = Parse(string(text))
	return err
}

// Parse parses a short name ("bf16"), PyTorch's name ("torch.bfloat16",
// "float16", "half") or safetensors' name ("BF16", "F8_E4M3").
func Parse(name string) (Type, error) {
	key := strings.ToLower(strings.TrimPrefix(name, "torch."))
	if t, ok := aliases[key]; ok {
		return t, nil
	}
	return Invalid, fmt.Errorf("unknown element type %q", name)
}

var aliases = func() map[string]Type {
	m := map[string]Type{
		"float32": F32, "float": F32, "f32": F32,
		"float16": F16, "half": F16, "f16": F16,
		"bfloat16": BF16,
		"float64":  F64, "double": F64, "f64": F64,
		"float8_e4m3fn": F8E4M3, "f8_e4m3": F8E4M3,
		"float8_e5m2": F8E5M2, "f8_e5m2": F8E5M2,
		"u8": U8, "i8": I8, "u16": U16, "i16": I16,
		"u32": U32, "i32": I32, "u64": U64, "i64": I64,
		"short": I16, "int": I32, "long": I64,
	}
	for t := Bool; int(t) < len(types); t++ {
		m[t.String()] = t
	}
	return m
}()
