package pickle

import (
	"errors"
	"fmt"
	"math"
	"slices"
)

// Splice replaces numbers behind keys in a pickle: all of one value, which are as many as expected. Nothing else of the
// pickle changes, whatever it has.
func Splice(text []byte, keys []string, count int, from, to int64) ([]byte, error) {
	places, err := findNumbers(text, keys)
	if err != nil {
		return nil, err
	}
	places = slices.DeleteFunc(places, func(p numberAt) bool { return p.value != float64(from) })
	if len(places) != count {
		return nil, fmt.Errorf("%d steps in it are %d, expected the %d of the optimizer", len(places), from, count)
	}
	var spliced []byte
	done := 0
	for _, p := range places {
		spliced = append(spliced, text[done:p.begin]...)
		var d Writer
		if p.isFloat {
			d.Value(float64(to))
		} else {
			d.Int(to)
		}
		spliced = append(spliced, d.Bytes()...)
		done = p.end
	}
	return append(spliced, text[done:]...), nil
}

// numberAt is where a number is in a pickle.
type numberAt struct {
	begin, end int
	value      float64
	isFloat    bool
}

// findNumbers finds the numbers that stand behind one of the keys.
func findNumbers(text []byte, keys []string) ([]numberAt, error) {
	u := &reader{text: text, memo: map[uint32]any{}, left: math.MaxInt64}
	named := map[uint32]bool{} // objects of the memo that are such a name
	isName, number := false, uint32(0)
	var places []numberAt
	for {
		begin := len(text) - len(u.text)
		opcode, operand, err := u.skip()
		switch {
		case err != nil:
			return nil, err
		case opcode == OpStop:
			return places, nil
		}
		wasName := isName
		isName = false
		switch opcode {
		case OpBinUnicode, OpShortBinUnicode:
			isName = slices.Contains(keys, string(operand))
		case OpBinPut, OpLongBinPut: // behind a name, it stays the last object
			isName = wasName
			if number = littleEndian(operand); wasName {
				named[number] = true
			} else {
				delete(named, number)
			}
		case OpMemoize:
			return nil, errors.New("it is not of protocol 2, as torch.save writes it")
		case OpBinGet, OpLongBinGet:
			isName = named[littleEndian(operand)]
		case OpBinInt1, OpBinInt2, OpBinInt, OpLong1, OpBinFloat:
			if wasName {
				p := numberAt{begin: begin, end: len(text) - len(u.text), isFloat: opcode == OpBinFloat}
				if p.value, err = literalAt(text[begin:p.end]); err != nil {
					return nil, err
				}
				places = append(places, p)
			}
		}
	}
}

// literalAt returns the number that an opcode pushes.
func literalAt(text []byte) (float64, error) {
	u := &reader{text: text[1:], left: math.MaxInt64}
	if err := u.literal(text[0]); err != nil {
		return 0, err
	}
	switch number := u.stack[0].(type) {
	case int64:
		return float64(number), nil
	case float64:
		return number, nil
	}
	return 0, errors.New("a step that is no number")
}
