package pickle

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
)

// Writer writes the few kinds of Python objects in a file of torch.save, in protocol 2 of pickle.
type Writer struct{ bytes.Buffer }

// Document returns the pickle of what write writes.
func Document(write func(*Writer)) []byte {
	var p Writer
	p.op(OpProto, 2)
	write(&p)
	p.op(OpStop)
	return p.Bytes()
}

func (p *Writer) op(bytes ...byte) { p.Write(bytes) }

func (p *Writer) Text(s string) {
	p.op(OpBinUnicode)
	p.Write(binary.LittleEndian.AppendUint32(nil, uint32(len(s))))
	p.WriteString(s)
}

func (p *Writer) Int(n int64) {
	if n == int64(int32(n)) {
		p.op(OpBinInt)
		p.Write(binary.LittleEndian.AppendUint32(nil, uint32(n)))
		return
	}
	digits := binary.LittleEndian.AppendUint64(nil, uint64(n)) // two's complement
	p.op(OpLong1)
	p.WriteByte(byte(len(digits)))
	p.Write(digits)
}

// Value writes what options of an optimizer are made of. Tensors and objects are not among them.
func (p *Writer) Value(x any) {
	switch x := x.(type) {
	case nil:
		p.op(OpNone)
	case bool:
		if x {
			p.op(OpNewTrue)
		} else {
			p.op(OpNewFalse)
		}
	case int64:
		p.Int(x)
	case float64:
		p.op(OpBinFloat)
		p.Write(binary.BigEndian.AppendUint64(nil, math.Float64bits(x)))
	case string:
		p.Text(x)
	case Tuple:
		p.Tuple(func() { p.values(x) })
	case *List:
		p.List(func() { p.values(x.Items) })
	case *Dict:
		p.Dict(func() {
			for _, e := range x.Entries {
				p.Value(e.Key)
				p.Value(e.Value)
			}
		})
	}
}

func (p *Writer) values(all []any) {
	for _, x := range all {
		p.Value(x)
	}
}

func (p *Writer) Global(module, name string) {
	fmt.Fprintf(p, "%c%s\n%s\n", OpGlobal, module, name)
}

func (p *Writer) Tuple(items func()) {
	p.op(OpMark)
	items()
	p.op(OpTuple)
}

func (p *Writer) Ints(numbers []int64) {
	p.Tuple(func() {
		for _, n := range numbers {
			p.Int(n)
		}
	})
}

func (p *Writer) Dict(items func()) {
	p.op(OpEmptyDict, OpMark)
	items()
	p.op(OpSetItems)
}

func (p *Writer) List(items func()) {
	p.op(OpEmptyList, OpMark)
	items()
	p.op(OpAppends)
}

// Call writes the result of a function.
func (p *Writer) Call(module, name string, arguments func()) {
	p.Global(module, name)
	p.Tuple(arguments)
	p.op(OpReduce)
}

// Object writes an object of a class, with its state.
func (p *Writer) Object(module, name string, state func()) {
	p.Global(module, name)
	p.op(OpEmptyTuple, OpNewObj)
	state()
	p.op(OpBuild)
}

// Tensor writes an fp32 tensor with a storage of its own, which has the key.
func (p *Writer) Tensor(key string, shape []int64) {
	numbers, strides := int64(1), make([]int64, len(shape))
	for i := len(shape) - 1; i >= 0; i-- {
		strides[i] = numbers
		numbers *= shape[i]
	}
	p.Call("torch._utils", "_rebuild_tensor_v2", func() {
		p.Tuple(func() {
			p.Text("storage")
			p.Global("torch", "FloatStorage")
			p.Text(key)
			p.Text("cpu")
			p.Int(numbers)
		})
		p.op(OpBinPersID)
		p.Int(0) // of the storage
		p.Ints(shape)
		p.Ints(strides)
		p.op(OpNewFalse)                                // requires_grad
		p.Call("collections", "OrderedDict", func() {}) // backward hooks: none
	})
}
