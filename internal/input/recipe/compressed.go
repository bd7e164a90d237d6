package recipe

import (
	"regexp"
	"slices"
	"strings"

	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// CompressedTensors is the quant_method of weights that llm-compressor and others write with compressed-tensors. The
// library has no kernels that train on packed weights: the first forward pass makes ordinary ones of them, which stay.
// Releases 0.10 to 0.12 keep the packed ones beside them (CompressedLinear in linear/compressed_linear.py), and
// 0.15 replaces them (ModelCompressor.add_decompress_hook).
const CompressedTensors = "compressed-tensors"

// packedArguments lists the fields of QuantizationArgs in compressed-tensors 0.15 that decide the size of a weight.
var packedArguments = strict.Object(rule.Boolean.For("symmetric"), rule.Text.OrNull().For("strategy actorder"),
	strict.Keys{
		"num_bits":   rule.Size,
		"group_size": rule.Integer.OrNull(),
		"type":       strict.Text("int", "float"),
	}).NotingOthers()

// compressedRule lists the fields of QuantizationConfig in compressed-tensors 0.15 that decide the size of weights.
var compressedRule = strict.Object(rule.Text.For("quant_method"), strict.Keys{
	"config_groups": strict.Map(strict.Object(strict.Keys{
		"targets":            rule.Names,
		"input_activations":  rule.Free.OrNull(),
		"output_activations": rule.Free.OrNull(),
		"weights":            packedArguments.OrNull(),
	}).NotingOthers()),
	"format":              rule.Text.OrNull(),
	"ignore":              rule.Names.OrNull(),
	"kv_cache_scheme":     rule.Free.OrNull(),
	"sparsity_config":     rule.Free.OrNull(),
	"transform_config":    rule.Free.OrNull(),
	"quantization_status": rule.Free.OrNull(),
}).NotingOthers()

// compressed returns the quantization of weights that compressed-tensors has packed into integers. It refuses forms
// that train otherwise: activations that are quantized, too, and groups of modules with a form of their own.
func compressed(d *strict.Document) (*Quantization, error) {
	r, err := strict.Schema{Program: CompressedTensors, Rule: compressedRule}.Read(d)
	if err != nil {
		return nil, err
	}
	const hint = `add "dequantize": true to plan ordinary weights, which is what trains after the first forward pass`
	refuse := func(at int64, what string) error {
		return d.Inputf(at, "%s, which is not planned yet", what).WithHint(hint)
	}
	groups, method := r.Find("config_groups"), r.At("quant_method")
	if format := r.Word("format"); format != "pack-quantized" {
		return nil, refuse(method, `quant_method is "compressed-tensors" and format is not "pack-quantized"`)
	}
	if groups == nil || len(groups.Members) != 1 {
		return nil, refuse(method, "compressed-tensors has other than one of config_groups")
	}
	group := groups.Members[0].Value
	weights := group.Find("weights")
	if targets := group.Find("targets"); targets == nil || !slices.Equal(targets.Texts(), []string{"Linear"}) {
		return nil, refuse(group.At, `targets are not ["Linear"]`)
	}
	for _, key := range []string{"input_activations", "output_activations"} {
		if m := group.Member(key); m != nil && !m.Value.IsEmpty() {
			return nil, refuse(m.At, key+" are quantized")
		}
	}
	for _, key := range []string{"sparsity_config", "transform_config"} {
		if v := r.Find(key); v != nil && !v.IsEmpty() {
			return nil, refuse(r.At(key), key+" is given")
		}
	}
	if weights == nil || weights.Kind != '{' {
		return nil, refuse(group.At, "weights are not quantized")
	}
	q := &Quantization{File: d.File, Method: CompressedTensors}
	if err := q.pack(d, weights, refuse); err != nil {
		return nil, err
	}
	if err := q.ignore(r); err != nil {
		return nil, err
	}
	return q, nil
}

// pack reads the form of packed weights, QuantizationArgs.
func (q *Quantization) pack(d *strict.Document, weights *strict.Value, refuse func(int64, string) error) error {
	word := func(key string) string {
		if v := weights.Find(key); v != nil && v.Kind == '"' {
			return v.Text
		}
		return ""
	}
	bits := weights.Find("num_bits")
	if bits == nil || bits.Integer != 4 && bits.Integer != 8 || word("type") == "float" {
		return refuse(weights.At, "compressed-tensors packs integers of 4 or 8 bits, and weights have another form")
	}
	q.Bits = int(bits.Integer)
	if size := weights.Find("group_size"); size != nil && size.Kind == '0' {
		q.Group = int(max(0, size.Integer))
	}
	switch strategy := word("strategy"); {
	case strategy == "group" && q.Group == 0:
		return d.Inputf(weights.At, "strategy is group, and group_size is not given: compressed-tensors refuses it").
			WithHint("give the group_size of the weights")
	case strategy == "channel":
		q.Group = 0
	case strategy != "group" && (strategy != "" || q.Group == 0):
		return refuse(weights.At, "strategy is neither group nor channel")
	}
	if symmetric := weights.Find("symmetric"); symmetric != nil {
		q.Asymmetric = symmetric.Kind == 'f'
	}
	q.Ordered = word("actorder") == "group"
	return nil
}

// ignore reads the modules that are not quantized: names, and expressions of Python behind "re:" that match from the
// beginning of a name (match_name in compressed_tensors/utils/match.py).
func (q *Quantization) ignore(r *strict.Reader) error {
	for _, name := range r.List("ignore") {
		expression, is := strings.CutPrefix(name, "re:")
		if !is {
			q.SkipModules = append(q.SkipModules, name)
			continue
		}
		compiled, err := r.Pattern("ignore", r.At("ignore"), "^", expression, "")
		if err != nil {
			return err
		}
		q.SkipPatterns = append(q.SkipPatterns, compiled)
	}
	return nil
}

// Skips reports whether the weight of a name is not quantized.
func (q *Quantization) Skips(weight string) bool {
	if q.Method != CompressedTensors {
		return slices.ContainsFunc(q.SkipModules, func(part string) bool { return strings.Contains(weight, part) })
	}
	module := strings.TrimSuffix(weight, ".weight")
	return slices.Contains(q.SkipModules, module) ||
		slices.ContainsFunc(q.SkipPatterns, func(e *regexp.Regexp) bool { return e.MatchString(module) })
}
