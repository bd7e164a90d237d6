package foreign

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"

	"plimsoll/internal/base/pickle"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/shard"
)

// quantizedClass admits the states of torchao's optimizers, and what describes a tensor.
func quantizedClass(c pickle.Class) bool {
	switch c.Module + "." + c.Name {
	case "torch.device", "torch.serialization._get_layout":
		return true
	}
	return strings.HasPrefix(c.Module, "torchao.") && codeBits[c.Name] > 0
}

// codeBits are the bits of a number in the states of torchao's optimizers, and in those of bitsandbytes.
var codeBits = map[string]int64{"OptimState8bit": 8, "OptimState4bit": 4, "OptimStateFp8": 8, blockwise: 8}

// quantized is a tensor of torchao or bitsandbytes: a code for each number, and a scale for each block.
type quantized struct {
	codes, scales checkpoint.Location
	bits          int64     // of a code
	block         int64     // numbers
	values        []float32 // by code
}

// momentOf returns where the numbers of a moment are. It has the shape of its parameter.
func (a *archive) momentOf(moment any, shape []int64) (checkpoint.Numbers, error) {
	switch m := moment.(type) {
	case pickle.Tensor:
		if m.Kind == "BFloat16Storage" {
			at, err := a.locateBytes(m, shape, 2)
			return bfloat16(at), err
		}
		return a.locate(m, shape)
	case *pickle.Object:
		return a.quantizedOf(m, shape)
	}
	return nil, fmt.Errorf("%s, expected a tensor", pickle.Shown(moment))
}

func (a *archive) quantizedOf(o *pickle.Object, shape []int64) (checkpoint.Numbers, error) {
	count, err := shard.Piece{Shape: shape}.Elements()
	if err != nil {
		return nil, err
	}
	q := quantized{bits: codeBits[o.Name]}
	codes, isCodes := pickle.Member(o.State, "codes").(pickle.Tensor)
	scales, isScales := pickle.Member(o.State, "scale").(pickle.Tensor)
	if q.bits == 0 || !isCodes || !isScales || len(scales.Shape) != 1 || scales.Shape[0] < 1 {
		return nil, fmt.Errorf("%s, expected one with codes and a list of scales", pickle.Shown(o))
	}
	switch {
	case o.Module == bitsandbytes:
		if q.block, err = blockOf(count, scales.Shape[0]); err != nil {
			return nil, err
		}
	case count%scales.Shape[0] != 0 || count*q.bits%8 != 0:
		return nil, fmt.Errorf("%d numbers with %d scales", count, scales.Shape[0])
	default:
		q.block = count / scales.Shape[0]
	}
	if q.bits == 4 {
		shape = []int64{count / 2}
	}
	kind := "ByteStorage"
	if o.Name == "OptimStateFp8" {
		kind, q.values = "float8_e4m3fn", float8Values()
	} else if q.values, err = a.tableOf(pickle.Member(o.State, "qmap"), 1<<q.bits); err != nil {
		return nil, err
	}
	if codes.Kind != kind {
		return nil, fmt.Errorf("codes in a %s, expected a %s", codes.Kind, kind)
	}
	if q.codes, err = a.locateBytes(codes, shape, 1); err != nil {
		return nil, err
	}
	q.scales, err = a.locate(scales, scales.Shape)
	return q, err
}

// tableOf reads a short tensor.
func (a *archive) tableOf(of any, count int64) ([]float32, error) {
	tensor, ok := of.(pickle.Tensor)
	if !ok {
		return nil, errors.New("it has no qmap")
	}
	at, err := a.locate(tensor, []int64{count})
	if err != nil {
		return nil, fmt.Errorf("qmap: %w", err)
	}
	b := make([]byte, 4*count)
	if _, err := a.data.ReadAt(b, at.Offset-a.base); err != nil {
		return nil, err
	}
	values := make([]float32, count)
	for i := range values {
		values[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
	}
	return values, nil
}

// float8Values are the values of e4m3fn, by code: a sign, four bits of exponent and three
// of fraction. It has no infinity, and one NaN of each sign.
func float8Values() []float32 {
	values := make([]float32, 256)
	for code := range values {
		exponent, fraction := code>>3&15, float64(code&7)/8
		value := math.Ldexp(1+fraction, exponent-7)
		switch {
		case exponent == 0:
			value = math.Ldexp(fraction, -6)
		case code&127 == 127:
			value = math.NaN()
		}
		if code >= 128 {
			value = math.Copysign(value, -1)
		}
		values[code] = float32(value)
	}
	return values
}

// Read computes numbers as torchao and bitsandbytes do: the value of the code times the scale, in fp32.
func (q quantized) Read(open checkpoint.Opener, first int64, b []byte) error {
	end := first + int64(len(b))/4
	from := first * q.bits / 8
	codes, err := readBytes(open, q.codes, from, (end*q.bits+7)/8-from)
	if err != nil {
		return err
	}
	firstBlock := first / q.block
	scales, err := readBytes(open, q.scales, 4*firstBlock, 4*((end-1)/q.block+1-firstBlock))
	if err != nil {
		return err
	}
	for number := first; number < end; number++ {
		code := codes[number*q.bits/8-from]
		if q.bits == 4 && number%2 == 0 { // the first of two is in the upper half
			code >>= 4
		}
		code &= 1<<q.bits - 1
		scale := math.Float32frombits(binary.LittleEndian.Uint32(scales[4*(number/q.block-firstBlock):]))
		binary.LittleEndian.PutUint32(b[4*(number-first):], math.Float32bits(q.values[code]*scale))
	}
	return nil
}

func readBytes(open checkpoint.Opener, at checkpoint.Location, from, count int64) ([]byte, error) {
	file, err := open(at.Path)
	if err != nil {
		return nil, err
	}
	b := make([]byte, count)
	if n, err := file.ReadAt(b, at.Offset+from); n < len(b) {
		return nil, checkpoint.CutShort(at.Path, err)
	}
	return b, nil
}

// bfloat16 is numbers in bf16: the upper halves of fp32 numbers.
type bfloat16 checkpoint.Location

func (p bfloat16) Read(open checkpoint.Opener, first int64, b []byte) error {
	halves, err := readBytes(open, checkpoint.Location(p), 2*first, int64(len(b))/2)
	if err != nil {
		return err
	}
	for i := 0; i < len(halves); i += 2 {
		copy(b[2*i:2*i+4], []byte{0, 0, halves[i], halves[i+1]})
	}
	return nil
}
