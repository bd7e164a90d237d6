package checkpoint

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
)

// pickler writes the few kinds of Python objects in a file of torch.save, in protocol 2
// of pickle.
type pickler struct{ bytes.Buffer }

// opcodes of pickle, as pickletools.dis names them.
const (
	opProto      = "\x80\x02"
	opStop       = "."
	opMark       = "("
	opEmptyDict  = "}"
	opSetItems   = "u"
	opEmptyList  = "]"
	opAppends    = "e"
	opTuple      = "t"
	opReduce     = "R"
	opNewTrue    = "\x88"
	opNewFalse   = "\x89"
	opFloat      = "G"
	opNone       = "N"
	opGlobal     = "c"
	opUnicode    = "X"
	opInt        = "J"
	opLong       = "\x8a"
	opPersistent = "Q"
	opNoItems    = ")"
	opNewObject  = "\x81"
	opBuild      = "b"
)

func (p *pickler) text(s string) {
	p.WriteString(opUnicode)
	p.Write(binary.LittleEndian.AppendUint32(nil, uint32(len(s))))
	p.WriteString(s)
}

func (p *pickler) int(n int64) {
	if n == int64(int32(n)) {
		p.WriteString(opInt)
		p.Write(binary.LittleEndian.AppendUint32(nil, uint32(n)))
		return
	}
	digits := binary.LittleEndian.AppendUint64(nil, uint64(n)) // two's complement
	p.WriteString(opLong)
	p.WriteByte(byte(len(digits)))
	p.Write(digits)
}

// value writes what options of an optimizer are made of. Tensors and objects are not among them: see isPlain.
func (p *pickler) value(x any) {
	switch x := x.(type) {
	case nil:
		p.WriteString(opNone)
	case bool:
		if x {
			p.WriteString(opNewTrue)
		} else {
			p.WriteString(opNewFalse)
		}
	case int64:
		p.int(x)
	case float64:
		p.WriteString(opFloat)
		p.Write(binary.BigEndian.AppendUint64(nil, math.Float64bits(x)))
	case string:
		p.text(x)
	case tuple:
		p.tuple(func() { p.values(x) })
	case *list:
		p.list(func() { p.values(x.items) })
	case *dict:
		p.dict(func() {
			for _, e := range x.entries {
				p.value(e.key)
				p.value(e.value)
			}
		})
	}
}

func (p *pickler) values(all []any) {
	for _, x := range all {
		p.value(x)
	}
}

func (p *pickler) global(module, name string) {
	fmt.Fprintf(p, "%s%s\n%s\n", opGlobal, module, name)
}

func (p *pickler) tuple(items func()) {
	p.WriteString(opMark)
	items()
	p.WriteString(opTuple)
}

func (p *pickler) ints(numbers []int64) {
	p.tuple(func() {
		for _, n := range numbers {
			p.int(n)
		}
	})
}

func (p *pickler) dict(items func()) {
	p.WriteString(opEmptyDict + opMark)
	items()
	p.WriteString(opSetItems)
}

func (p *pickler) list(items func()) {
	p.WriteString(opEmptyList + opMark)
	items()
	p.WriteString(opAppends)
}

// call writes the result of a function.
func (p *pickler) call(module, name string, arguments func()) {
	p.global(module, name)
	p.tuple(arguments)
	p.WriteString(opReduce)
}

// object writes an object of a class, with its state.
func (p *pickler) object(module, name string, state func()) {
	p.global(module, name)
	p.WriteString(opNoItems + opNewObject)
	state()
	p.WriteString(opBuild)
}

// tensor writes an fp32 tensor with a storage of its own, which has the key.
func (p *pickler) tensor(key string, shape []int64) {
	numbers, strides := int64(1), make([]int64, len(shape))
	for i := len(shape) - 1; i >= 0; i-- {
		strides[i] = numbers
		numbers *= shape[i]
	}
	p.call("torch._utils", "_rebuild_tensor_v2", func() {
		p.tuple(func() {
			p.text("storage")
			p.global("torch", "FloatStorage")
			p.text(key)
			p.text("cpu")
			p.int(numbers)
		})
		p.WriteString(opPersistent)
		p.int(0) // of the storage
		p.ints(shape)
		p.ints(strides)
		p.WriteString(opNewFalse)                       // requires_grad
		p.call("collections", "OrderedDict", func() {}) // backward hooks: none
	})
}
