package checkpoint

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/nlpodyssey/gopickle/pickle"
	"github.com/nlpodyssey/gopickle/types"
)

// storage is where the numbers of a tensor are.
type storage struct {
	kind string // "FloatStorage"
	key  string // of the entry in the archive
}

// torchTensor is a tensor as a pickle describes it, without its numbers.
type torchTensor struct {
	storage
	offset  int64 // in the storage, in elements
	shape   []int64
	strides []int64
}

// unpickle reads the document of a file of torch.save. Nothing but the classes
// that tensors are made of can be in it, and none of them runs.
func unpickle(text []byte) (document any, err error) {
	defer func() {
		if p := recover(); p != nil { // which is how the library answers some malformed pickles
			err = fmt.Errorf("malformed pickle: %v", p)
		}
	}()
	u := pickle.NewUnpickler(bytes.NewReader(text))
	u.FindClass = func(module, name string) (any, error) {
		switch {
		case module == "torch._utils" && name == "_rebuild_tensor_v2":
			return rebuild{}, nil
		case module == "torch._utils" && name == "_rebuild_parameter":
			return rebuildParameter{}, nil
		case module == "torch":
			return torchName(name), nil
		}
		return nil, fmt.Errorf("the pickle has a %s.%s, expected nothing but tensors, numbers and texts in dicts and lists", module, name)
	}
	u.PersistentLoad = func(id any) (any, error) {
		x, ok := id.(*types.Tuple)
		if !ok || x.Len() != 5 {
			return nil, fmt.Errorf("malformed pickle: %v is no storage", id)
		}
		kind, isKind := x.Get(1).(torchName)
		key, isKey := x.Get(2).(string)
		if !isKind || !isKey {
			return nil, fmt.Errorf("malformed pickle: %v is no storage", id)
		}
		return storage{string(kind), key}, nil
	}
	return u.Load()
}

// torchName is a class of torch.
type torchName string

// rebuild makes a tensor of its storage.
type rebuild struct{}

// Call takes what torch._utils._rebuild_tensor_v2 takes.
func (rebuild) Call(arguments ...any) (any, error) {
	if len(arguments) < 4 {
		return nil, fmt.Errorf("malformed pickle: a tensor of %d arguments", len(arguments))
	}
	s, isStorage := arguments[0].(storage)
	offset, isOffset := arguments[1].(int)
	shape, isShape := sizes(arguments[2])
	strides, isStrides := sizes(arguments[3])
	if !isStorage || !isOffset || !isShape || !isStrides || offset < 0 || offset > maxElements {
		return nil, fmt.Errorf("malformed pickle: %v are not what a tensor is made of", arguments[:4])
	}
	return torchTensor{s, int64(offset), shape, strides}, nil
}

// rebuildParameter gives the tensor of a torch.nn.Parameter.
type rebuildParameter struct{}

// Call takes what torch._utils._rebuild_parameter takes.
func (rebuildParameter) Call(arguments ...any) (any, error) {
	if len(arguments) == 0 {
		return nil, fmt.Errorf("malformed pickle: a parameter without a tensor")
	}
	return arguments[0], nil
}

func sizes(tuple any) ([]int64, bool) {
	t, ok := tuple.(*types.Tuple)
	if !ok {
		return nil, false
	}
	list := make([]int64, 0, t.Len())
	for _, item := range *t {
		n, ok := item.(int)
		if !ok || n < 0 || n > maxElements {
			return nil, false
		}
		list = append(list, int64(n))
	}
	return list, true
}

// entries are those of a dict.
func entries(dict any) ([]types.DictEntry, bool) {
	switch d := dict.(type) {
	case *types.Dict:
		return *d, true
	case *types.OrderedDict:
		var list []types.DictEntry
		for e := d.List.Front(); e != nil; e = e.Next() {
			if entry, ok := e.Value.(*types.OrderedDictEntry); ok {
				list = append(list, types.DictEntry{Key: entry.Key, Value: entry.Value})
			}
		}
		return list, true
	}
	return nil, false
}

// member is that of a dict, nil where there is none.
func member(dict any, key string) any {
	list, _ := entries(dict)
	for _, e := range slices.Backward(list) { // as in Python, the last counts
		if name, ok := e.Key.(string); ok && name == key {
			return e.Value
		}
	}
	return nil
}

func items(list any) []any {
	if l, ok := list.(*types.List); ok {
		return *l
	}
	return nil
}
