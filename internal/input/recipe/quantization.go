package recipe

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// Quantization is how bitsandbytes stores the weights of linear layers. The
// defaults are those of BitsAndBytesConfig in transformers 5.23.
type Quantization struct {
	File string

	// Method is "gptq", "awq", "aqlm" or CompressedTensors for weights that were quantized before the training, "" for
	// bitsandbytes.
	Method string
	Bits   int // 4 or 8, of others also 1 to 3; 0 = nothing is quantized
	Group  int // inputs that share a scale in Method, or a code of AQLM; 0 = all
	// Codebooks are those of AQLM, with a code of CodeBits for each group.
	Codebooks, CodeBits int
	// Of CompressedTensors: groups have zero points, inputs have the index of their group, and modules are not
	// quantized, beside SkipModules.
	Asymmetric, Ordered bool
	SkipPatterns        []*regexp.Regexp

	// For 4 bits.
	Kind         string     `key:"bnb_4bit_quant_type"`       // "fp4" or "nf4"
	DoubleQuant  bool       `key:"bnb_4bit_use_double_quant"` // the scales are quantized, too
	ComputeDType dtype.Type // of the matrix products
	StorageDType dtype.Type // of storage elements, which pack two or more weights: U8 by default

	// For 8 bits.
	Threshold   float64 `key:"llm_int8_threshold"`       // columns with larger activations are in fp16; 0 = none
	FP16Weights bool    `key:"llm_int8_has_fp16_weight"` // 16-bit weights are kept for training

	SkipModules []string `key:"llm_int8_skip_modules"`            // nil = transformers' default: the output head
	OffloadCPU  bool     `key:"llm_int8_enable_fp32_cpu_offload"` // modules on the CPU are allowed, in fp32

	// Dequantized reports whether transformers converts stored weights to
	// ordinary ones while it loads them.
	Dequantized bool

	Notes []Note
}

// bitsAndBytesRule lists the fields of BitsAndBytesConfig:
// utils/quantization_config.py. transformers ignores all other keys.
var bitsAndBytesRule = strict.Object(
	rule.Boolean.For(`load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit llm_int8_enable_fp32_cpu_offload
		llm_int8_has_fp16_weight bnb_4bit_use_double_quant`), // to_dict writes those with _, too
	rule.Text.For("quant_method"),
	strict.Keys{
		"llm_int8_threshold":    rule.Amount.Default(6.),
		"llm_int8_skip_modules": rule.Names.OrNull(),
		"bnb_4bit_compute_dtype": strict.Text(
			"float32", "float", "float16", "half", "bfloat16", "float64", "double").OrNull().Default("float32"),
		"bnb_4bit_quant_type": strict.Text("fp4", "nf4").Default("fp4"),
		"bnb_4bit_quant_storage": strict.Text(
			"float16", "float32", "int8", "uint8", "float64", "bfloat16").OrNull().Default("uint8"),
	}).NotingOthers()

// quantizationMethods are the other members of QuantizationMethod.
var quantizationMethods = []string{"gptq", "awq", "aqlm", "vptq", "quanto", "eetq", "higgs", "hqq",
	"compressed-tensors", "fbgemm_fp8", "torchao", "gguf", "bitnet", "spqr", "fp8", "quark", "fp_quant", "auto-round",
	"mxfp4", "nvfp4", "mxfp8", "metal", "fouroversix", "sinq", "gemma"}

// LoadQuantization reads the file at path: a config.json with a
// quantization_config, or the JSON of a BitsAndBytesConfig.
func LoadQuantization(path string) (*Quantization, error) {
	return load(nil, path, QuantizationKind, ParseQuantization)
}

// ParseQuantization parses the text of a file. The name of the file is for
// messages only. Every error is a *fault.Input.
func ParseQuantization(file string, text []byte) (*Quantization, error) {
	document, err := strict.Parse(file, text)
	if err != nil {
		return nil, err
	}
	return readQuantization(document)
}

// quantizationIn returns the quantization_config of a config.json, or nil.
func quantizationIn(d *strict.Document) (*strict.Member, error) {
	section := d.Root.Member("quantization_config")
	if text := d.Root.Find("text_config"); text != nil && (section == nil || section.Value.IsEmpty()) {
		section = cmp.Or(text.Member("quantization_config"), section)
	}
	if section == nil {
		section = d.Root.Member("compression_config") // the older name, of compressed-tensors
	}
	const mlx = "MLX has packed the weights, which transformers does not read"
	if m := d.Root.Member("quantization"); section == nil && m != nil && m.Value.Kind == '{' {
		return nil, d.Inputf(m.At, "the key quantization says that "+mlx).WithHint(unpacked)
	}
	if section == nil || section.Value.Kind != '{' || section.Value.IsEmpty() {
		return section, nil
	}
	for _, key := range []string{"quant_method", "load_in_4bit", "load_in_8bit"} {
		if section.Value.Member(key) != nil {
			return section, nil
		}
	}
	why := "transformers refuses it"
	if section.Value.Member("bits") != nil {
		why += "; perhaps " + mlx
	}
	return nil, d.Inputf(section.At, "%s has no quant_method: %s", section.Name, why).WithHint(unpacked)
}

const unpacked = "name the weights before they were quantized, or remove the key to plan them so"

// readQuantization reads a parsed document.
func readQuantization(document *strict.Document) (*Quantization, error) {
	file := document.File
	section, err := quantizationIn(document)
	if err != nil {
		return nil, err
	}
	switch {
	case section != nil && section.Value.Kind != 'n':
		document.Root = section.Value
	case section != nil || ModelKind.mark(document.Root) != nil:
		return nil, fault.File(file).Inputf("this configuration of a model has no quantization_config").
			WithHint("give the JSON of a BitsAndBytesConfig, or plan without quantization")
	}
	if m := document.Root.Member("quant_method"); m != nil && (m.Value.Text == "gptq" || m.Value.Text == "awq") {
		return packed(document, m.Value.Text)
	} else if m != nil && m.Value.Text == "aqlm" {
		return additive(document)
	} else if m != nil && m.Value.Text == CompressedTensors && dequantized(document, CompressedTensors) == nil {
		return compressed(document)
	}
	r, err := strict.Schema{Program: "BitsAndBytesConfig", Rule: bitsAndBytesRule}.Read(document)
	if method := document.Root.Member("quant_method"); method != nil && method.Value.Kind == '"' &&
		method.Value.Text != "bitsandbytes" {
		if q := dequantized(document, method.Value.Text); q != nil {
			return q, nil
		}
		return nil, otherMethod(document, method.Value)
	}
	if err != nil {
		return nil, err
	}
	q := &Quantization{File: file, ComputeDType: r.Type("bnb_4bit_compute_dtype"),
		StorageDType: r.Type("bnb_4bit_quant_storage")}
	r.Fill(q)
	if skipped := r.Find("llm_int8_skip_modules"); skipped != nil && skipped.Kind == '[' && q.SkipModules == nil {
		q.SkipModules = []string{} // transformers takes an empty list as it is
	}
	four, eight := r.Truth("load_in_4bit"), r.Truth("load_in_8bit")
	switch {
	case four:
		q.Bits = 4
	case eight:
		q.Bits = 8
	default:
		r.Notes = append(r.Notes, Note{Where: fault.Position{File: file},
			What: "neither load_in_4bit nor load_in_8bit is true: nothing is quantized"})
	}
	if four && !r.Gives("bnb_4bit_quant_type") {
		r.Notes = append(r.Notes, Note{Where: fault.Position{File: file},
			What: `bnb_4bit_quant_type is not given: the default is "fp4", but most jobs use "nf4"`})
	}
	threshold := "6.0"
	if v := r.Find("llm_int8_threshold"); v != nil {
		threshold = v.Text
	}
	if err := r.Refuse([]strict.Conflict{
		{four && eight, "load_in_8bit",
			fmt.Sprintf("and load_in_4bit (line %d) are both true: only one can be", r.Place("load_in_4bit").Line),
			"set one of the two to false"},
		{!strings.ContainsAny(threshold, ".eE"), "llm_int8_threshold",
			"is " + threshold + ", which Python reads as an int, but BitsAndBytesConfig takes a float only",
			"write " + threshold + ".0"},
	}); err != nil {
		return nil, err
	}
	q.Notes = r.Notes
	return q, nil
}

// dequantized returns the quantization of a method whose weights transformers
// is asked to convert to ordinary ones, or nil. Each method has its own keys,
// so it reads only the keys that decide this.
func dequantized(d *strict.Document, method string) *Quantization {
	key := map[string]string{"fp8": "dequantize", "mxfp4": "dequantize", "compressed-tensors": "dequantize"}[method]
	is := func(name string, kind jsontext.Kind) bool {
		m := d.Root.Member(name)
		return m != nil && m.Value.Kind == kind
	}
	if key == "" || !is(key, 't') && !(method == "compressed-tensors" && is("run_compressed", 'f')) {
		return nil
	}
	return &Quantization{
		File:        d.File,
		Dequantized: true,
		Notes: []Note{{Where: fault.Position{File: d.File}, What: "the weights are stored by " + method +
			" and dequantized while they are loaded: the plan has ordinary weights"}},
	}
}

// packedRule lists the fields of GPTQConfig and AwqConfig in transformers 5.23 that decide the size of weights, by
// their old names, too.
var packedRule = strict.Object(rule.Integer.For("bits w_bit group_size q_group_size"),
	rule.Names.OrNull().For("modules_to_not_convert"),
	rule.Boolean.For("lm_head"), rule.Text.For("quant_method"), rule.Free.OrNull().For("dynamic")).NotingOthers()

// packed returns the quantization of weights that GPTQ or AWQ has packed into integers.
func packed(d *strict.Document, method string) (*Quantization, error) {
	r, err := strict.Schema{Program: strings.ToUpper(method), Rule: packedRule}.Read(d)
	if err != nil {
		return nil, err
	}
	q := &Quantization{File: d.File, Method: method, Bits: 4, Group: 128, SkipModules: r.List("modules_to_not_convert")}
	for _, key := range []string{"w_bit", "bits"} {
		if r.Gives(key) {
			q.Bits = int(r.Integer(key))
		}
	}
	for _, key := range []string{"q_group_size", "group_size"} {
		if r.Gives(key) {
			q.Group = max(0, int(r.Integer(key)))
		}
	}
	allowed := map[string][]int{"gptq": {2, 3, 4, 8}, "awq": {4}}[method]
	if !slices.Contains(allowed, q.Bits) {
		return nil, fault.File(d.File).Inputf("%s in %d bits is not planned", strings.ToUpper(method), q.Bits).
			WithHint(fmt.Sprintf("GPTQModel's kernels for training have %v", allowed))
	}
	if On(r.Find("dynamic")) {
		return nil, r.Fault("dynamic", "gives some modules a quantization of their own, which is not planned yet", "")
	}
	if r.Truth("lm_head") {
		return nil, r.Fault("lm_head", "is true: the output head is quantized, which is not planned yet", "")
	}
	return q, nil
}

// additiveRule lists the fields of AqlmConfig in transformers 5.23.
var additiveRule = strict.Object(rule.Text.For("quant_method"),
	rule.Names.OrNull().For("linear_weights_not_to_quantize"), strict.Keys{
		"in_group_size": rule.Integer.Default(8), "out_group_size": rule.Integer.Default(1),
		"num_codebooks":      rule.Integer.Default(1),
		"nbits_per_codebook": rule.Integer.Default(16)}).NotingOthers()

// additive returns the quantization of weights that AQLM has made codes of. Only shapes are planned whose training has
// kernels of its own (get_backward_pass_kernel in aqlm 1.1.7).
func additive(d *strict.Document) (*Quantization, error) {
	r, err := strict.Schema{Program: "AQLM", Rule: additiveRule}.Read(d)
	if err != nil {
		return nil, err
	}
	q := &Quantization{File: d.File, Method: "aqlm", Group: int(r.Integer("in_group_size")),
		Codebooks: int(r.Integer("num_codebooks")), CodeBits: int(r.Integer("nbits_per_codebook"))}
	shape := [4]int{q.Codebooks, q.CodeBits, int(r.Integer("out_group_size")), q.Group}
	if !slices.Contains([][4]int{{1, 16, 1, 8}, {2, 8, 1, 8}, {1, 8, 1, 8}}, shape) {
		return nil, fault.File(d.File).Inputf("AQLM with %d codebooks of %d bits for %d x %d weights is not planned",
			shape[0], shape[1], shape[2], shape[3]).
			WithHint("aqlm has kernels for training with 1x16, 2x8 and 1x8 bits for 1 x 8 weights")
	}
	q.Bits = q.Codebooks * q.CodeBits / q.Group
	for _, weight := range r.List("linear_weights_not_to_quantize") {
		q.SkipModules = append(q.SkipModules, strings.TrimSuffix(weight, ".weight"))
	}
	return q, nil
}

// otherMethod refuses methods other than bitsandbytes.
func otherMethod(d *strict.Document, method *strict.Value) error {
	if slices.Contains(quantizationMethods, method.Text) {
		return d.Inputf(method.At, "quant_method is %s, which is not planned yet", method).
			WithHint("plimsoll plans bitsandbytes, gptq, awq, aqlm and packed compressed-tensors; to plan the " +
				`training of dequantized weights, remove quantization_config (fp8, mxfp4 and compressed-tensors: or add "dequantize": true)`)
	}
	return d.Inputf(method.At, "quant_method is %s, which transformers does not know", method).
		WithHint(strict.DidYouMean(method.Text, append(slices.Clone(quantizationMethods), "bitsandbytes")))
}
