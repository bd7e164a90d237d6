package checkpoint

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"

	"plimsoll/internal/base/files"
)

// stepKeys are the names of steps in the pickle of an optimizer.
var stepKeys = []string{"step", "common_step"}

// spliceSteps replaces steps that are numbers in a pickle: all of one value, which are as many as expected. Nothing
// else of the pickle changes, whatever it has.
func spliceSteps(text []byte, count int, from, to int64) ([]byte, error) {
	places, err := findSteps(text)
	if err != nil {
		return nil, err
	}
	places = slices.DeleteFunc(places, func(p stepPlace) bool { return p.value != float64(from) })
	if len(places) != count {
		return nil, fmt.Errorf("%d steps in it are %d, expected the %d of the optimizer", len(places), from, count)
	}
	var spliced []byte
	done := 0
	for _, p := range places {
		spliced = append(spliced, text[done:p.begin]...)
		var d pickler
		if p.isFloat {
			d.value(float64(to))
		} else {
			d.int(to)
		}
		spliced = append(spliced, d.Bytes()...)
		done = p.end
	}
	return append(spliced, text[done:]...), nil
}

// stepPlace is where a number is in a pickle.
type stepPlace struct {
	begin, end int
	value      float64
	isFloat    bool
}

// findSteps finds the numbers that stand behind the name of a step.
func findSteps(text []byte) ([]stepPlace, error) {
	u := &unpickler{text: text, memo: map[uint32]any{}, left: math.MaxInt64}
	named := map[uint32]bool{} // objects of the memo that are such a name
	isName, number := false, uint32(0)
	var places []stepPlace
	for {
		begin := len(text) - len(u.text)
		opcode, operand, err := u.skip()
		switch {
		case err != nil:
			return nil, err
		case opcode == opStop[0]:
			return places, nil
		}
		wasName := isName
		isName = false
		switch opcode {
		case 'X', '\x8c':
			isName = slices.Contains(stepKeys, string(operand))
		case 'q', 'r': // behind a name, it stays the last object
			isName = wasName
			if number = littleEndian(operand); wasName {
				named[number] = true
			} else {
				delete(named, number)
			}
		case '\x94':
			return nil, errors.New("it is not of protocol 2, as torch.save writes it")
		case 'h', 'j':
			isName = named[littleEndian(operand)]
		case 'K', 'M', 'J', '\x8a', 'G':
			if wasName {
				p := stepPlace{begin: begin, end: len(text) - len(u.text), isFloat: opcode == 'G'}
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
	u := &unpickler{text: text[1:], left: math.MaxInt64}
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

// replacePickle writes the archive again, with another pickle.
func (a *archive) replacePickle(path string, pickle []byte) error {
	file, err := files.NewPending(path)
	if err != nil {
		return err
	}
	defer file.Cleanup()
	buffer := bufio.NewWriter(file)
	w := newArchiveWriter(buffer)
	err = w.entry("data.pkl", pickle)
	for _, name := range slices.Sorted(maps.Keys(a.entries)) {
		if err == nil && name != "data.pkl" {
			var from io.ReadCloser
			if from, err = a.entries[name].Open(); err == nil {
				var to io.Writer
				if to, err = w.create(name); err == nil {
					_, err = io.Copy(to, from)
				}
				err = errors.Join(err, from.Close())
			}
		}
	}
	if err == nil {
		err = w.zip.Close()
	}
	if err == nil {
		err = buffer.Flush()
	}
	if err != nil {
		return err
	}
	return file.CloseAtomicallyReplace()
}
