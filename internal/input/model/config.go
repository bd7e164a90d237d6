package model

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/recipe/strict"
)

// config is a config.json. Each method reads one field, and panics with a refusal if
// its value is not of the model's class. So the description of an architecture needs
// no error checks, and never goes on with a value that was refused.
//
// Sizes of the model are required, even if a class of transformers has a
// default: that default is the size of another model. Optional fields have the
// default of the class.
type config struct {
	*strict.Document
	fields map[string]strict.Member
}

// refusal is why a config.json describes no model. Methods of config panic with it, and unlessRefused recovers.
type refusal struct{ error }

// unlessRefused returns what read makes of a configuration, or the fault that it found.
func unlessRefused[T any](read func() T) (result T, err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case refusal:
			err = r.error
		default:
			panic(r)
		}
	}()
	return read(), nil
}

// maxSize bounds every size. Vocabularies are below a million, and a product of
// two sizes must not overflow.
const maxSize = 1 << 24

// fail refuses the configuration. It does not return.
func (c *config) fail(at int64, hint, format string, arguments ...any) {
	panic(refusal{c.Inputf(at, format, arguments...).WithHint(hint)})
}

// find returns the first of the names that the file has. A null counts as
// absent.
func (c *config) find(names ...string) (found, bool) {
	for _, name := range names {
		if m, ok := c.fields[name]; ok && m.Value.Kind != 'n' {
			return found{name, m.Value}, true
		}
	}
	return found{Value: &strict.Value{}}, false
}

// found is the value of a field with the name that the file uses.
type found struct {
	name string
	*strict.Value
}

func (c *config) isNull(name string) bool {
	m, ok := c.fields[name]
	return ok && m.Value.Kind == 'n'
}

// size returns a required positive integer. Further names are other spellings
// of the field.
func (c *config) size(names ...string) int64 {
	if _, ok := c.find(names...); !ok {
		if i := slices.IndexFunc(names, c.isNull); i >= 0 {
			c.fail(c.fields[names[i]].Value.At, "write the size of the model", "%s is null, expected a whole number",
				names[i])
		}
		hint := fmt.Sprintf("add %q with the size of the model", names[0])
		if near := fault.Nearest(names[0], slices.Sorted(maps.Keys(c.fields))); near != "" {
			hint = fmt.Sprintf("the file says %q: did you mean %q?", near, names[0])
		}
		c.fail(0, hint, "%s is missing", strings.Join(names, " or "))
	}
	return c.sizeOr(0, names...)
}

// sizeOr returns a positive integer, or the fallback if it is absent.
func (c *config) sizeOr(fallback int64, names ...string) int64 {
	return c.integer(1, fallback, names...)
}

// countOr returns an integer that may be zero, or the fallback if it is absent.
func (c *config) countOr(fallback int64, names ...string) int64 {
	return c.integer(0, fallback, names...)
}

func (c *config) integer(least float64, fallback int64, names ...string) int64 {
	if v, ok := c.take(strict.Integer().Digits().From(least).To(maxSize), names...); ok {
		return v.Integer
	}
	return fallback
}

func (c *config) flagOr(fallback bool, name string) bool {
	if v, ok := c.take(strict.Boolean(), name); ok {
		return v.Truth
	}
	return fallback
}

// shareOr returns a number from 0 to 1, or the fallback if it is absent.
func (c *config) shareOr(fallback float64, names ...string) float64 {
	if v, ok := c.take(strict.Number().From(0).To(1), names...); ok {
		return v.Number
	}
	return fallback
}

func (c *config) textOr(fallback, name string) string {
	if v, ok := c.take(strict.Text(), name); ok {
		return v.Text
	}
	return fallback
}

// list returns the elements of a list, or none if it is absent.
func (c *config) list(name string) []*strict.Value {
	v, _ := c.take(strict.List(strict.Rule{}), name)
	return v.Elements
}

// take returns the first of the names that the file has, if the rule accepts
// its value.
func (c *config) take(rule strict.Rule, names ...string) (found, bool) {
	v, ok := c.find(names...)
	if !ok {
		return v, false
	}
	if err := c.Take(rule, v.name, v.Value); err != nil {
		panic(refusal{err})
	}
	return v, true
}

// refuse reports a feature that changes the parameters but is not described
// here. A wrong list would be worse than none.
func (c *config) refuse(name string) {
	if c.flagOr(false, name) {
		c.fail(c.fields[name].Value.At, Documented, "%s is not supported", name)
	}
}

// section returns the fields of an object of the file.
func (c *config) section(name string) *config {
	inner := &config{Document: c.Document, fields: map[string]strict.Member{}}
	v, ok := c.find(name)
	if ok && v.Kind != '{' {
		c.fail(v.At, "", "%s is %s: expected an object", name, v)
	}
	for _, m := range v.Members {
		inner.fields[m.Name] = m
	}
	return inner
}

// isSet reports whether a number is neither absent nor zero.
func (c *config) isSet(name string) bool {
	v, ok := c.take(strict.Number(), name)
	return ok && v.Number != 0
}

// divide returns whole/parts. It reports a fault if there is a remainder.
func (c *config) divide(whole int64, wholeName string, parts int64, partsName string) int64 {
	if whole%parts != 0 {
		v, _ := c.find(wholeName, partsName)
		c.fail(v.At, "", "%s is %d: expected a multiple of %s, which is %d", wholeName, whole, partsName, parts)
	}
	return whole / parts
}

// dtype returns the type of the published weights. The default of transformers
// is float32.
func (c *config) dtype() dtype.Type {
	v, ok := c.find("dtype", "torch_dtype")
	if text, inside := c.find("text_config"); !ok && inside {
		for _, name := range []string{"dtype", "torch_dtype"} {
			if m := text.Member(name); m != nil && m.Value.Kind == '"' {
				v, ok = found{name, m.Value}, true
			}
		}
	}
	if !ok {
		return dtype.F32
	}
	t, _ := dtype.Parse(v.Text)
	if !slices.Contains([]dtype.Type{dtype.F16, dtype.BF16, dtype.F32, dtype.F64}, t) {
		c.fail(v.At, "", `%s is %s: expected "float32", "bfloat16" or "float16"`, v.name, v)
	}
	return t
}

// Documented says which models are planned, and which are not but rehearsed.
const Documented = "docs/models.md lists the architectures that 'plimsoll plan' knows; with the headers of the " +
	"model's safetensors files beside its config.json it plans any other without activations"

// unknownArchitecture is a fault of its own type, because the folder may hold
// safetensors headers that loadFolder can read instead.
type unknownArchitecture struct {
	name string
	fault.Input
}

func (u *unknownArchitecture) Unwrap() error { return &u.Input }

// architecture returns the architecture of architectures[0], or else of
// model_type.
func (c *config) architecture() architecture {
	if list := c.list("architectures"); len(list) > 0 {
		name := list[0].Text
		if err := c.Take(strict.Text(), "architectures[0]", list[0]); err != nil {
			panic(refusal{err})
		}
		names := []string{}
		for _, a := range architectures {
			if a.name == name {
				return a
			}
			names = append(names, a.name)
		}
		panic(refusal{c.unknown(list[0].At, "architecture", name, names)})
	}
	modelType := c.textOr("", "model_type")
	if modelType == "" {
		c.fail(0, "name the config.json that lies beside the weights of a model",
			"architectures and model_type are both missing")
	}
	types := []string{}
	for _, a := range architectures {
		if a.modelType == modelType {
			return a
		}
		types = append(types, a.modelType)
	}
	panic(refusal{c.unknown(c.fields["model_type"].Value.At, "model_type", modelType, types)})
}

func (c *config) unknown(at int64, kind, name string, known []string) error {
	hint := Documented
	if near := nearestClass(name, known); near != "" {
		hint = fmt.Sprintf("did you mean %q? Otherwise: %s", near, hint)
	}
	unknown := c.Inputf(at, "unknown %s %q", kind, name).WithHint(hint)
	return &unknownArchitecture{name, *unknown}
}

// nearestClass returns the class that a name misspells, or "". The part that
// tells the family decides, and numbers have to be the same.
func nearestClass(name string, known []string) string {
	family, head, _ := strings.Cut(name, "For")
	numbers := func(s string) string { return strings.Join(digits.FindAllString(s, -1), " ") }
	for _, k := range known {
		f, h, _ := strings.Cut(k, "For")
		if strings.EqualFold(h, head) && numbers(f) == numbers(family) &&
			(strings.EqualFold(f, family) || fault.Nearest(family, []string{f}) != "") {
			return k
		}
	}
	return ""
}

var digits = lazyregexp.New(`[0-9]+`)

func newConfig(doc *strict.Document) (*config, error) {
	if _, err := (strict.Schema{Rule: strict.Free()}).Read(doc); err != nil {
		return nil, err
	}
	c := &config{Document: doc, fields: map[string]strict.Member{}}
	for _, m := range doc.Root.Members {
		c.fields[m.Name] = m
	}
	return c, nil
}

func fromConfig(doc *strict.Document, name, source string) (*Model, error) {
	c, err := newConfig(doc)
	if err != nil {
		return nil, err
	}
	return unlessRefused(func() *Model { return c.model(name, source) })
}

// model returns the model that the configuration describes.
func (c *config) model(name, source string) *Model {
	a := c.architecture()
	t := c.dtype()
	root := scope{construction: &construction{config: c, body: "model",
		made: &made{weights: t, network: &Network{}, known: architectures}}}
	a.describe(root)
	numberBlocks(root.parameters)
	var hidden int64
	if root.opaque {
		root.network = nil
		if len(root.mixtures) > 0 {
			hidden = root.size("hidden_size")
		}
	} else {
		root.mixtures = nil
	}
	_, quantized := c.find("quantization_config", "compression_config", "quantization") // the last is MLX's
	if text, inside := c.find("text_config"); inside && !quantized {
		quantized = text.Member("quantization_config") != nil // transformers looks there, too
	}
	return &Model{
		Name:         name,
		Architecture: a.name,
		Type:         a.modelType,
		Source:       source,
		Quantized:    quantized,
		Parameters:   root.parameters,
		Network:      root.network,
		Encoders:     root.encoders,
		textType:     cmp.Or(root.textType, a.modelType),
		mixtures:     root.mixtures,
		hidden:       hidden,
	}
}
