package recipe

import (
	"fmt"
	"slices"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/dtype"
	"plimsoll/fault"
)

// Quantization is how bitsandbytes stores the weights of linear layers. The
// defaults are those of BitsAndBytesConfig in transformers 5.23.
type Quantization struct {
	File string

	Bits int // 4 or 8; 0 = nothing is quantized

	// For 4 bits.
	Kind         string     // "fp4" or "nf4"
	DoubleQuant  bool       // the scales are quantized, too
	ComputeDType dtype.Type // of the matrix products
	StorageDType dtype.Type // of storage elements, which pack two or more weights: U8 by default

	// For 8 bits.
	Threshold   float64 // columns with larger activations are computed in fp16; 0 = none
	FP16Weights bool    // 16-bit weights are kept for training

	SkipModules []string // nil = transformers' default: the output head
	OffloadCPU  bool     // modules on the CPU are allowed, in fp32

	// Dequantized reports whether transformers converts stored weights to
	// ordinary ones while it loads them.
	Dequantized bool

	Notes []Note
}

// bitsAndBytesKeys are the fields of BitsAndBytesConfig:
// utils/quantization_config.py. transformers ignores all other keys.
var bitsAndBytesKeys = map[string]rule{
	"quant_method":                     isText(),
	"load_in_4bit":                     isBoolean(),
	"load_in_8bit":                     isBoolean(),
	"_load_in_4bit":                    isBoolean(), // to_dict writes these, too
	"_load_in_8bit":                    isBoolean(),
	"llm_int8_threshold":               isNumber().from(0),
	"llm_int8_skip_modules":            isList(isText()).orNull(),
	"llm_int8_enable_fp32_cpu_offload": isBoolean(),
	"llm_int8_has_fp16_weight":         isBoolean(),
	"bnb_4bit_compute_dtype": isText(
		"float32", "float", "float16", "half", "bfloat16", "float64", "double").orNull(),
	"bnb_4bit_quant_type":       isText("fp4", "nf4"),
	"bnb_4bit_use_double_quant": isBoolean(),
	"bnb_4bit_quant_storage":    isText("float16", "float32", "int8", "uint8", "float64", "bfloat16").orNull(),
}

// quantizationMethods are the other members of QuantizationMethod.
var quantizationMethods = []string{"gptq", "awq", "aqlm", "vptq", "quanto", "eetq", "higgs", "hqq",
	"compressed-tensors", "fbgemm_fp8", "torchao", "gguf", "bitnet", "spqr", "fp8", "quark", "fp_quant", "auto-round",
	"mxfp4", "nvfp4", "mxfp8", "metal", "fouroversix", "sinq", "gemma"}

// LoadQuantization reads the file at path: a config.json with a
// quantization_config, or the JSON of a BitsAndBytesConfig.
func LoadQuantization(path string) (*Quantization, error) {
	return load(path, quantizationKind, ParseQuantization)
}

// ParseQuantization parses the text of a file. The name of the file is for
// messages only. Every error is a *fault.Input.
func ParseQuantization(file string, text []byte) (*Quantization, error) {
	document, err := parseDocument(file, text)
	if err != nil {
		return nil, err
	}
	section := document.root.member("quantization_config")
	if section == nil {
		section = document.root.member("compression_config") // the older name, of compressed-tensors
	}
	switch {
	case section != nil && section.value.kind != 'n':
		document.root = section.value
	case section != nil || document.root.member("model_type") != nil || document.root.member("architectures") != nil:
		return nil, &fault.Input{
			Where: fault.Position{File: file},
			What:  "this config.json has no quantization_config",
			Hint:  "give the JSON of a BitsAndBytesConfig, or plan without quantization",
		}
	}
	c, err := schema{"BitsAndBytesConfig", isObject(bitsAndBytesKeys).notingOthers()}.read(document)
	if method := document.root.member("quant_method"); method != nil && method.value.kind == '"' &&
		method.value.text != "bitsandbytes" {
		if q := c.dequantized(file, method.value.text); q != nil {
			return q, nil
		}
		return nil, c.otherMethod(method.value)
	}
	if err != nil {
		return nil, err
	}
	q := &Quantization{
		File:         file,
		Kind:         c.word("fp4", "bnb_4bit_quant_type"),
		DoubleQuant:  c.truth(false, "bnb_4bit_use_double_quant"),
		ComputeDType: dtype.F32, StorageDType: dtype.U8,
		Threshold:   c.number(6, "llm_int8_threshold"),
		FP16Weights: c.truth(false, "llm_int8_has_fp16_weight"),
		SkipModules: c.list("llm_int8_skip_modules"),
		OffloadCPU:  c.truth(false, "llm_int8_enable_fp32_cpu_offload"),
	}
	if t := c.elements("bnb_4bit_compute_dtype"); t != dtype.Invalid {
		q.ComputeDType = t
	}
	if t := c.elements("bnb_4bit_quant_storage"); t != dtype.Invalid {
		q.StorageDType = t
	}
	four, eight := c.truth(false, "load_in_4bit"), c.truth(false, "load_in_8bit")
	switch {
	case four:
		q.Bits = 4
	case eight:
		q.Bits = 8
	default:
		c.notes = append(c.notes,
			Note{fault.Position{File: file}, "neither load_in_4bit nor load_in_8bit is true: nothing is quantized"})
	}
	if four && c.root.find("bnb_4bit_quant_type") == nil {
		c.notes = append(c.notes, Note{fault.Position{File: file},
			`bnb_4bit_quant_type is not given: it is "fp4", though most train with "nf4"`})
	}
	threshold := c.word("6.0", "llm_int8_threshold")
	if err := c.refuse([]conflict{
		{four && eight, "load_in_8bit",
			fmt.Sprintf("and load_in_4bit (line %d) are both true: only one can be", c.place("load_in_4bit").Line),
			"set one of the two to false"},
		{!strings.ContainsAny(threshold, ".eE"), "llm_int8_threshold",
			"is " + threshold + ", which Python reads as an int, but BitsAndBytesConfig takes a float only",
			"write " + threshold + ".0"},
	}); err != nil {
		return nil, err
	}
	q.Notes = c.notes
	return q, nil
}

// dequantized returns the quantization of a method whose weights transformers
// is asked to convert to ordinary ones, or nil. Each method has its own keys,
// so it reads only the keys that decide this.
func (c *checking) dequantized(file, method string) *Quantization {
	key := map[string]string{"fp8": "dequantize", "mxfp4": "dequantize", "compressed-tensors": "dequantize"}[method]
	is := func(name string, kind jsontext.Kind) bool {
		m := c.root.member(name)
		return m != nil && m.value.kind == kind
	}
	if key == "" || !is(key, 't') && !(method == "compressed-tensors" && is("run_compressed", 'f')) {
		return nil
	}
	return &Quantization{
		File:        file,
		Dequantized: true,
		Notes: []Note{{fault.Position{File: file}, "the weights are stored by " + method +
			" and dequantized while they are loaded: they are planned as ordinary ones"}},
	}
}

// otherMethod refuses methods other than bitsandbytes.
func (c *checking) otherMethod(method *value) error {
	if slices.Contains(quantizationMethods, method.text) {
		return c.bad(method.at, fmt.Sprintf("quant_method is %s, which is not planned yet", method),
			"planned is bitsandbytes; to plan the training of dequantized weights, remove quantization_config (fp8, "+
				"mxfp4 and compressed-tensors: or add \"dequantize\": true)")
	}
	in := &fault.Input{
		Where: c.position(method.at),
		What:  fmt.Sprintf("quant_method is %s, which transformers does not know", method),
	}
	if near := fault.Nearest(method.text, append(slices.Clone(quantizationMethods), "bitsandbytes")); near != "" {
		in.Hint = fmt.Sprintf("did you mean %q?", near)
	}
	return in
}
