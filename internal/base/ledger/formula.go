package ledger

import (
	"math/big"
	"strings"
)

// Formula is a sum of products: how the bytes of a component come about.
type Formula []Term

// Term is a product. Its last factor is in bytes, or the one before divisors.
type Term []Factor

// Factor is a number with its unit: "494,032,768 parameters", "2 B (bf16)", "4 ranks".
type Factor struct {
	Number int64  `json:"number"`
	Unit   string `json:"unit"`
	// Divides means that the product is divided by the number.
	Divides bool `json:"divides,omitempty"`
}

// Of returns a factor.
func Of(number int64, unit string) Factor { return Factor{Number: number, Unit: unit} }

// Per returns a divisor.
func Per(number int64, unit string) Factor { return Factor{Number: number, Unit: unit, Divides: true} }

// Bytes evaluates the formula. It reports false where the result is no whole number, or there is no formula.
func (f Formula) Bytes() (Bytes, bool) {
	sum := new(big.Rat)
	for _, t := range f {
		product := big.NewRat(1, 1)
		for _, x := range t {
			number := new(big.Rat).SetInt64(x.Number)
			switch {
			case x.Divides && x.Number == 0:
				return 0, false
			case x.Divides:
				product.Quo(product, number)
			default:
				product.Mul(product, number)
			}
		}
		sum.Add(sum, product)
	}
	if len(f) == 0 || !sum.IsInt() || !sum.Num().IsInt64() {
		return 0, false
	}
	return Bytes(sum.Num().Int64()), true
}

// Times returns the formula of so many times the bytes.
func (f Formula) Times(number int64, unit string) Formula {
	if number == 1 {
		return f
	}
	var times Formula
	for _, t := range f {
		times = append(times, append(Term{Of(number, unit)}, t...))
	}
	return times
}

// Lines returns the formula in text, a term a line, and its value with every digit.
func (f Formula) Lines() []string {
	var lines []string
	for i, t := range f {
		text := t.String()
		if i > 0 {
			text = "+ " + text
		}
		lines = append(lines, text)
	}
	if sum, ok := f.Bytes(); ok {
		lines = append(lines, "= "+sum.Exact())
	}
	return lines
}

// String returns the formula in one line: "494,032,768 parameters x 2 B (bf16) / 4 ranks = 247,016,384 B".
func (f Formula) String() string { return strings.Join(f.Lines(), " ") }

// String returns the product in text.
func (t Term) String() string {
	var text strings.Builder
	for i, x := range t {
		switch {
		case x.Divides:
			text.WriteString(" / ")
		case i > 0:
			text.WriteString(" x ")
		}
		text.WriteString(Count(x.Number) + " " + x.Unit)
	}
	return text.String()
}

// Origin is the place in a program's source that makes a component. Note says what makes the component, or gives its
// size, where no source does.
type Origin struct {
	Project  string `json:"project"`
	Release  string `json:"release,omitempty"`  // empty where no release is in force
	File     string `json:"file,omitempty"`     // empty where no source makes the component
	Function string `json:"function,omitempty"` // "Class.method", or a function of the module
	Note     string `json:"note,omitempty"`
}

// String returns "DeepSpeed 0.18.3, deepspeed/runtime/zero/stage3.py, DeepSpeedZeroOptimizer_Stage3.step".
func (o Origin) String() string {
	text := o.Project
	if o.Release != "" {
		text += " " + o.Release
	}
	for _, part := range []string{o.File, o.Function} {
		if part != "" {
			text += ", " + part
		}
	}
	if o.Note != "" {
		text += " (" + o.Note + ")"
	}
	return text
}
