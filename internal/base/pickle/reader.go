package pickle

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"unicode/utf8"
)

// Python objects of a pickle, beside nil, bool, int64, float64 and string.
type (
	Tuple []any
	List  struct{ Items []any }
	Dict  struct {
		Entries []Entry
		places  map[any]int // the last place of each key, for look-ups in a large dict
	}
	Entry struct{ Key, Value any }
	// Class is a name. Nothing is ever called.
	Class struct{ Module, Name string }
	// Object is an object of an admitted class: the arguments of its call, and its attributes.
	Object struct {
		Class
		Arguments Tuple
		State     any
	}
	// Storage says where the numbers of a tensor are.
	Storage struct {
		Kind string // "FloatStorage"
		Key  string // of the entry in the archive
	}
)

// Tensor is a tensor as a pickle describes it, without its numbers.
type Tensor struct {
	Storage
	Offset  int64 // in the storage, in elements
	Shape   []int64
	Strides []int64
}

// NewDict returns a dict of keys and values, one behind the other.
func NewDict(pairs ...any) *Dict {
	d := &Dict{}
	for i := 0; i < len(pairs); i += 2 {
		d.Entries = append(d.Entries, Entry{pairs[i], pairs[i+1]})
	}
	return d
}

// Member returns a member of a dict, or nil if there is none.
func Member(of any, key string) any {
	d, _ := of.(*Dict)
	if d == nil {
		return nil
	}
	if len(d.Entries) > 16 {
		return d.lookUp(key)
	}
	for i := len(d.Entries) - 1; i >= 0; i-- { // as in Python, the last counts
		if d.Entries[i].Key == any(key) {
			return d.Entries[i].Value
		}
	}
	return nil
}

// lookUp is Member for a large dict. Nothing may be added to it afterwards.
func (d *Dict) lookUp(key string) any {
	if d.places == nil {
		d.places = make(map[any]int, len(d.Entries))
		for i, e := range d.Entries {
			d.places[e.Key] = i
		}
	}
	if i, ok := d.places[key]; ok {
		return d.Entries[i].Value
	}
	return nil
}

// Entries returns the entries of a dict, and Items those of a list.
func Entries(of any) []Entry {
	if d, ok := of.(*Dict); ok {
		return d.Entries
	}
	return nil
}

func Items(of any) []any {
	if l, ok := of.(*List); ok {
		return l.Items
	}
	return nil
}

// Shown returns an object as messages show it.
func Shown(x any) string {
	switch x := x.(type) {
	case nil:
		return "None"
	case bool, int64, float64:
		return fmt.Sprint(x)
	case string:
		return fmt.Sprintf("%.60q", x)
	case Class:
		return fmt.Sprintf("a %.40s.%.40s", x.Module, x.Name)
	case *Object:
		return "a " + Shown(x.Class)[2:]
	case Tuple:
		return "a tuple"
	case *List:
		return "a list"
	case *Dict:
		return "a dict"
	}
	return "a tensor"
}

// Read reads the document of a file of torch.save. It knows the opcodes that Python
// writes for tensors, numbers and texts in dicts, lists and tuples. It runs no code of
// the document: an object of an admitted class (nil admits none) is its name with what
// it was made of. Its objects take no more than a few times the length of the document.
func Read(text []byte, admitted func(Class) bool) (any, error) {
	u := &reader{
		text: text, admitted: admitted, memo: map[uint32]any{}, left: freeBytes + bytesPerByte*int64(len(text)),
	}
	if err := u.findFetched(); err != nil {
		return nil, err
	}
	for {
		at := len(text) - len(u.text)
		opcode, err := u.take(1)
		if err != nil {
			return nil, err
		}
		if opcode[0] == OpStop {
			return u.pop()
		}
		if err := u.execute(opcode[0]); err != nil {
			return nil, fmt.Errorf("byte %d of the pickle: %w", at, err)
		}
	}
}

// Bounds of the objects of a pickle: one byte of it can make an object of 48 bytes.
// Pickles of torch.save make up to 9 bytes of objects for each byte of their own. All
// parameters of a file may be on the stack at once.
const (
	freeBytes    = 16 << 20
	bytesPerByte = 16
	maxStack     = 1 << 21
)

type reader struct {
	text  []byte // still to be read
	left  int64  // bytes that objects may still take
	stack []any
	marks []int          // places in the stack
	memo  map[uint32]any // objects that are fetched again, by number
	// fetched are the numbers of these objects. Python numbers nearly every object
	// and fetches few: keeping all would take most of the memory.
	fetched  map[uint32]bool
	stored   uint32 // how many objects have been numbered
	admitted func(Class) bool
}

// operands are the number of bytes behind each opcode, if it is fixed.
var operands = map[byte]int{
	OpProto: 1, OpBinInt1: 1, OpBinInt2: 2, OpBinInt: 4, OpBinFloat: 8, OpBinPut: 1, OpLongBinPut: 4, OpBinGet: 1,
	OpLongBinGet: 4, OpFrame: 8,
}

// findFetched walks along the opcodes and notes the objects that are fetched.
func (u *reader) findFetched() error {
	u.fetched = map[uint32]bool{}
	text := u.text
	defer func() { u.text = text }()
	for {
		opcode, operand, err := u.skip()
		switch {
		case err != nil:
			return err
		case opcode == OpStop:
			return nil
		case opcode != OpBinGet && opcode != OpLongBinGet:
			continue
		}
		if number := littleEndian(operand); !u.fetched[number] {
			if err := u.charge(bytesOfMemo); err != nil {
				return err
			}
			u.fetched[number] = true
		}
	}
}

// skip takes an opcode and its operand, without executing it.
func (u *reader) skip() (opcode byte, operand []byte, err error) {
	first, err := u.take(1)
	if err != nil {
		return 0, nil, err
	}
	switch opcode = first[0]; opcode {
	case OpBinUnicode, OpLong1, OpShortBinUnicode:
		operand, err = u.counted(opcode)
	case OpGlobal:
		if _, err = u.line(); err == nil {
			_, err = u.line()
		}
	default:
		operand, err = u.take(operands[opcode])
	}
	return opcode, operand, err
}

func littleEndian(b []byte) uint32 {
	return binary.LittleEndian.Uint32(append(append(make([]byte, 0, 4), b...), 0, 0, 0)[:4])
}

// counted takes the operand of an opcode whose first bytes are its length.
func (u *reader) counted(opcode byte) ([]byte, error) {
	bytes := 1
	if opcode == OpBinUnicode {
		bytes = 4
	}
	n, err := u.number(bytes)
	if err != nil {
		return nil, err
	}
	return u.take(int(n))
}

// About how many bytes objects take.
const (
	bytesOfObject = 32 // a list, a dict, a tuple or a text, without its items
	bytesOfItem   = 16 // an item
	bytesOfMemo   = 96 // a place in the memo and in fetched
)

// emptyTuple is the one object that all empty tuples share.
var emptyTuple any = Tuple{}

var errCutShort = errors.New("the pickle ends too early")

func (u *reader) take(n int) ([]byte, error) {
	if len(u.text) < n {
		return nil, errCutShort
	}
	b := u.text[:n]
	u.text = u.text[n:]
	return b, nil
}

// number takes a little-endian number.
func (u *reader) number(bytes int) (uint32, error) {
	b, err := u.take(bytes)
	if err != nil {
		return 0, err
	}
	return littleEndian(b), nil
}

func (u *reader) line() (string, error) {
	end := bytes.IndexByte(u.text, '\n')
	if end < 0 {
		return "", errCutShort
	}
	b, err := u.take(end + 1)
	return string(b[:end]), err
}

func (u *reader) push(x any) error {
	if len(u.stack) >= maxStack {
		return fmt.Errorf("more than %d objects are on the stack", maxStack)
	}
	u.stack = append(u.stack, x)
	return nil
}

// pushNew pushes an object that takes its own memory.
func (u *reader) pushNew(x any, bytes int) error {
	if err := u.charge(bytes); err != nil {
		return err
	}
	return u.push(x)
}

// charge takes bytes off the memory that objects may still take.
func (u *reader) charge(bytes int) error {
	if u.left -= int64(bytes); u.left < 0 {
		return fmt.Errorf("its objects take more than %d bytes for each of its own", bytesPerByte)
	}
	return nil
}

var errStack = errors.New("nothing is on the stack")

// pop takes the uppermost object. top leaves it on the stack.
func (u *reader) pop() (any, error) {
	x, err := u.top()
	if err == nil {
		u.stack = u.stack[:len(u.stack)-1]
	}
	return x, err
}

func (u *reader) top() (any, error) {
	if last := len(u.stack) - 1; last >= 0 && (len(u.marks) == 0 || last >= u.marks[len(u.marks)-1]) {
		return u.stack[last], nil
	}
	return nil, errStack
}

// popTo takes the objects above a place.
func (u *reader) popTo(place int) ([]any, error) {
	if place < 0 || place > len(u.stack) {
		return nil, errStack
	}
	taken := append([]any{}, u.stack[place:]...)
	u.stack = u.stack[:place]
	return taken, nil
}

// popMark takes the objects above the last mark.
func (u *reader) popMark() ([]any, error) {
	last := len(u.marks) - 1
	if last < 0 {
		return nil, errors.New("there is no mark")
	}
	place := u.marks[last]
	u.marks = u.marks[:last]
	return u.popTo(place)
}

// execute executes an opcode. The names are from pickletools.
func (u *reader) execute(opcode byte) error {
	switch opcode {
	case OpProto:
		if version, err := u.number(1); err != nil || version < 2 || version > 5 {
			return fmt.Errorf("protocol %d, expected 2 to 5: %w", version, err)
		}
		return nil
	case OpFrame: // says how much to read at once
		_, err := u.take(operands[opcode])
		return err
	case OpMark:
		if len(u.marks) >= maxStack {
			return fmt.Errorf("more than %d marks are on the stack", maxStack)
		}
		u.marks = append(u.marks, len(u.stack))
		return nil
	case OpNone:
		return u.push(nil)
	case OpNewTrue, OpNewFalse:
		return u.push(opcode == OpNewTrue)
	case OpEmptyDict:
		return u.pushNew(&Dict{}, bytesOfObject)
	case OpEmptyList:
		return u.pushNew(&List{}, bytesOfObject)
	case OpEmptyTuple:
		return u.push(emptyTuple)
	case OpBinInt1, OpBinInt2, OpBinInt, OpLong1, OpBinFloat, OpBinUnicode, OpShortBinUnicode:
		return u.literal(opcode)
	case OpTuple, OpTuple1, OpTuple2, OpTuple3:
		return u.tuple(opcode)
	case OpAppend, OpAppends, OpSetItem, OpSetItems:
		return u.extend(opcode)
	case OpBinPut, OpLongBinPut, OpBinGet, OpLongBinGet, OpMemoize:
		return u.remember(opcode)
	case OpGlobal, OpStackGlobal:
		return u.class(opcode)
	case OpReduce, OpNewObj, OpBinPersID, OpBuild:
		return u.construct(opcode)
	}
	return fmt.Errorf("opcode %q, expected those that torch.save writes", opcode)
}

// literal pushes a number or a text.
func (u *reader) literal(opcode byte) error {
	switch opcode {
	case OpBinFloat:
		b, err := u.take(operands[opcode])
		if err != nil {
			return err
		}
		return u.push(math.Float64frombits(binary.BigEndian.Uint64(b)))
	case OpBinUnicode, OpLong1, OpShortBinUnicode:
		b, err := u.counted(opcode)
		switch {
		case err != nil:
			return err
		case opcode == OpLong1:
			return u.long(b)
		case !utf8.Valid(b):
			return errors.New("a text that is not UTF-8")
		}
		return u.pushNew(string(b), bytesOfObject+len(b))
	}
	n, err := u.number(operands[opcode])
	if err != nil {
		return err
	}
	if opcode == OpBinInt {
		return u.push(int64(int32(n)))
	}
	return u.push(int64(n))
}

// long pushes an integer of up to 8 bytes, in two's complement.
func (u *reader) long(b []byte) error {
	x, bytes := int64(0), len(b)
	for i, digit := range b {
		if i < 8 {
			x |= int64(digit) << (8 * i)
		} else if digit != 0 {
			return errors.New("an integer of more than 64 bits")
		}
	}
	if 0 < bytes && bytes < 8 && b[bytes-1]&0x80 != 0 {
		x -= 1 << (8 * bytes)
	}
	return u.push(x)
}

func (u *reader) tuple(opcode byte) error {
	var parts []any
	var err error
	if opcode == OpTuple {
		parts, err = u.popMark()
	} else {
		parts, err = u.popTo(len(u.stack) - int(opcode-OpTuple1) - 1)
	}
	if err != nil {
		return err
	}
	return u.pushNew(Tuple(parts), bytesOfObject+bytesOfItem*len(parts))
}

// extend adds to a list or a dict.
func (u *reader) extend(opcode byte) error {
	var parts []any
	var err error
	switch opcode {
	case OpAppend:
		parts, err = u.popTo(len(u.stack) - 1)
	case OpSetItem:
		parts, err = u.popTo(len(u.stack) - 2)
	default:
		parts, err = u.popMark()
	}
	if err != nil {
		return err
	}
	to, err := u.top()
	if err != nil {
		return err
	}
	if err := u.charge(2 * bytesOfItem * len(parts)); err != nil { // a slice grows to up to twice its length
		return err
	}
	switch to := to.(type) {
	case *List:
		if opcode == OpAppend || opcode == OpAppends {
			to.Items = append(to.Items, parts...)
			return nil
		}
	case *Dict:
		if (opcode == OpSetItem || opcode == OpSetItems) && len(parts)%2 == 0 {
			for i := 0; i < len(parts); i += 2 {
				to.Entries = append(to.Entries, Entry{hashable(parts[i]), parts[i+1]})
			}
			return nil
		}
	}
	return fmt.Errorf("%d objects cannot be added to %s", len(parts), Shown(to))
}

// hashable returns a key that can be compared, or nil: other keys are never looked up.
func hashable(key any) any {
	switch key.(type) {
	case string, int64, *Object:
		return key
	}
	return nil
}

// remember numbers objects and fetches them again.
func (u *reader) remember(opcode byte) error {
	number := u.stored
	if opcode != OpMemoize {
		var err error
		if number, err = u.number(operands[opcode]); err != nil {
			return err
		}
	}
	if opcode == OpBinPut || opcode == OpLongBinPut || opcode == OpMemoize {
		u.stored++
		x, err := u.top()
		if err == nil && u.fetched[number] {
			u.memo[number] = x
		}
		return err
	}
	x, ok := u.memo[number]
	if !ok {
		return fmt.Errorf("object %d was never stored", number)
	}
	return u.push(x)
}

// class pushes a name.
func (u *reader) class(opcode byte) error {
	if opcode == OpStackGlobal {
		parts, err := u.popTo(len(u.stack) - 2)
		if err != nil {
			return err
		}
		module, isText := parts[0].(string)
		name, isName := parts[1].(string)
		if !isText || !isName {
			return errors.New("a class without a name")
		}
		return u.pushNew(Class{module, name}, bytesOfObject)
	}
	module, err := u.line()
	if err != nil {
		return err
	}
	name, err := u.line()
	if err != nil {
		return err
	}
	return u.pushNew(Class{module, name}, bytesOfObject+len(module)+len(name))
}

// construct makes tensors and their parts, and objects.
func (u *reader) construct(opcode byte) error {
	argument, err := u.pop()
	if err != nil {
		return err
	}
	switch opcode {
	case OpBinPersID:
		return u.storage(argument)
	case OpBuild: // attributes, as a state_dict has
		x, err := u.top()
		if o, ok := x.(*Object); ok {
			o.State = argument
		}
		return err
	}
	callable, err := u.pop()
	if err != nil {
		return err
	}
	arguments, _ := argument.(Tuple)
	switch callable {
	case any(Class{"torch._utils", "_rebuild_tensor_v2"}):
		return u.tensor(arguments)
	case any(Class{"torch._utils", "_rebuild_parameter"}): // its first argument is the tensor
		if len(arguments) > 0 {
			return u.push(arguments[0])
		}
	case any(Class{"torch._utils", "_rebuild_tensor_v3"}):
		return u.tensorOf(arguments)
	case any(Class{"torch._tensor", "_rebuild_from_type_v2"}): // a function, a type, arguments, attributes
		if len(arguments) == 4 && arguments[0] == any(Class{"torch._utils", "_rebuild_wrapper_subclass"}) {
			return u.subclass(arguments)
		}
		if len(arguments) > 2 && arguments[0] == any(Class{"torch._utils", "_rebuild_tensor_v2"}) &&
			arguments[1] == any(Class{"torch", "Tensor"}) {
			parts, _ := arguments[2].(Tuple)
			return u.tensor(parts)
		}
	case any(Class{"collections", "OrderedDict"}):
		return u.pushNew(&Dict{}, bytesOfObject)
	case any(Class{"torch", "Size"}):
		if len(arguments) > 0 {
			return u.push(arguments[0])
		}
	}
	if of, ok := callable.(Class); ok && u.admitted != nil && u.admitted(of) {
		return u.pushNew(&Object{Class: of, Arguments: arguments}, 3*bytesOfObject)
	}
	return fmt.Errorf("%s, expected nothing but tensors, numbers and texts in dicts and lists", Shown(callable))
}

// storage pushes the object that torch.save writes in place of numbers.
func (u *reader) storage(id any) error {
	if parts, ok := id.(Tuple); ok && len(parts) == 5 {
		kind, isKind := parts[1].(Class)
		key, isKey := parts[2].(string)
		if isKind && isKey && (kind.Module == "torch" || kind.Module == "torch.storage") {
			return u.pushNew(Storage{kind.Name, key}, bytesOfObject)
		}
	}
	return errors.New("a persistent object that is no storage")
}

// subclass pushes a tensor that is made of others, as an object with these as attributes.
func (u *reader) subclass(arguments Tuple) error {
	of, ok := arguments[1].(Class)
	parts, _ := arguments[2].(Tuple)
	if !ok || u.admitted == nil || !u.admitted(of) {
		return fmt.Errorf("%s, expected nothing but tensors, numbers and texts in dicts and lists", Shown(arguments[1]))
	}
	return u.pushNew(&Object{of, parts, arguments[3]}, 3*bytesOfObject)
}

// tensorOf pushes a tensor whose dtype is its seventh argument: its storage has none.
func (u *reader) tensorOf(arguments Tuple) error {
	if len(arguments) >= 7 {
		s, isStorage := arguments[0].(Storage)
		dtype, isType := arguments[6].(Class)
		if isStorage && isType && dtype.Module == "torch" {
			return u.tensor(append(Tuple{Storage{dtype.Name, s.Key}}, arguments[1:4]...))
		}
	}
	return errors.New("a tensor that is not made of a storage, an offset, a shape, strides and a dtype")
}

// tensor pushes a tensor from storage, offset, shape and strides.
func (u *reader) tensor(arguments Tuple) error {
	if len(arguments) >= 4 {
		s, isStorage := arguments[0].(Storage)
		offset, isOffset := arguments[1].(int64)
		shape, isShape := Sizes(arguments[2])
		strides, isStrides := Sizes(arguments[3])
		if isStorage && isOffset && isShape && isStrides && offset >= 0 && offset <= maxElements {
			return u.pushNew(Tensor{s, offset, shape, strides}, 3*bytesOfObject+8*(len(shape)+len(strides)))
		}
	}
	return errors.New("a tensor that is not made of a storage, an offset, a shape and strides")
}

// maxElements keeps products of sizes within 64 bits, and maxDimensions is PyTorch's limit.
const maxElements, MaxDimensions = 1 << 50, 64

// Sizes returns the numbers of a tuple that is a shape.
func Sizes(of any) ([]int64, bool) {
	t, ok := of.(Tuple)
	if len(t) > MaxDimensions {
		return nil, false
	}
	list := make([]int64, 0, len(t))
	for _, part := range t {
		n, isSize := part.(int64)
		if !isSize || n < 0 || n > maxElements {
			return nil, false
		}
		list = append(list, n)
	}
	return list, ok
}
