package checkpoint

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"unicode/utf8"

	"plimsoll/internal/state/shard"
)

// Python objects of a pickle, beside nil, bool, int64, float64 and string.
type (
	tuple []any
	list  struct{ items []any }
	dict  struct {
		entries []entry
		places  map[any]int // the last place of each key, for look-ups in a large dict
	}
	entry struct{ key, value any }
	// class is a name. Nothing is ever called.
	class struct{ module, name string }
	// object is an object of an admitted class: the arguments of its call, and its attributes.
	object struct {
		class
		arguments tuple
		state     any
	}
	// storage says where the numbers of a tensor are.
	storage struct {
		kind string // "FloatStorage"
		key  string // of the entry in the archive
	}
)

// torchTensor is a tensor as a pickle describes it, without its numbers.
type torchTensor struct {
	storage
	offset  int64 // in the storage, in elements
	shape   []int64
	strides []int64
}

// member returns a member of a dict, or nil if there is none.
func member(of any, key string) any {
	d, _ := of.(*dict)
	if d == nil {
		return nil
	}
	if len(d.entries) > 16 {
		return d.lookUp(key)
	}
	for i := len(d.entries) - 1; i >= 0; i-- { // as in Python, the last counts
		if d.entries[i].key == any(key) {
			return d.entries[i].value
		}
	}
	return nil
}

// lookUp is member for a large dict. Nothing may be added to it afterwards.
func (d *dict) lookUp(key string) any {
	if d.places == nil {
		d.places = make(map[any]int, len(d.entries))
		for i, e := range d.entries {
			d.places[e.key] = i
		}
	}
	if i, ok := d.places[key]; ok {
		return d.entries[i].value
	}
	return nil
}

// entries returns the entries of a dict. items returns the items of a list.
func entries(of any) []entry {
	if d, ok := of.(*dict); ok {
		return d.entries
	}
	return nil
}

func items(of any) []any {
	if l, ok := of.(*list); ok {
		return l.items
	}
	return nil
}

// shown returns an object as messages show it.
func shown(x any) string {
	switch x := x.(type) {
	case nil:
		return "None"
	case bool, int64, float64:
		return fmt.Sprint(x)
	case string:
		return fmt.Sprintf("%.60q", x)
	case class:
		return fmt.Sprintf("a %.40s.%.40s", x.module, x.name)
	case *object:
		return "a " + shown(x.class)[2:]
	case tuple:
		return "a tuple"
	case *list:
		return "a list"
	case *dict:
		return "a dict"
	}
	return "a tensor"
}

// unpickle reads the document of a file of torch.save. It knows the opcodes that Python
// writes for tensors, numbers and texts in dicts, lists and tuples. It runs no code of
// the document: an object of an admitted class (nil admits none) is its name with what
// it was made of. Its objects take no more than a few times the length of the document.
func unpickle(text []byte, admitted func(class) bool) (any, error) {
	u := &unpickler{
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
		if string(opcode) == opStop {
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

type unpickler struct {
	text  []byte // still to be read
	left  int64  // bytes that objects may still take
	stack []any
	marks []int          // places in the stack
	memo  map[uint32]any // objects that are fetched again, by number
	// fetched are the numbers of these objects. Python numbers nearly every object
	// and fetches few: keeping all would take most of the memory.
	fetched  map[uint32]bool
	stored   uint32 // how many objects have been numbered
	admitted func(class) bool
}

// operands are the number of bytes behind each opcode, if it is fixed.
var operands = map[byte]int{'\x80': 1, 'K': 1, 'M': 2, 'J': 4, 'G': 8, 'q': 1, 'r': 4, 'h': 1, 'j': 4, '\x95': 8}

// findFetched walks along the opcodes and notes the objects that are fetched.
func (u *unpickler) findFetched() error {
	u.fetched = map[uint32]bool{}
	text := u.text
	defer func() { u.text = text }()
	for {
		opcode, operand, err := u.skip()
		switch {
		case err != nil:
			return err
		case opcode == opStop[0]:
			return nil
		case opcode != 'h' && opcode != 'j': // BINGET, LONG_BINGET
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
func (u *unpickler) skip() (opcode byte, operand []byte, err error) {
	first, err := u.take(1)
	if err != nil {
		return 0, nil, err
	}
	switch opcode = first[0]; opcode {
	case 'X', '\x8a', '\x8c': // BINUNICODE, LONG1, SHORT_BINUNICODE
		operand, err = u.counted(opcode)
	case 'c': // GLOBAL
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
func (u *unpickler) counted(opcode byte) ([]byte, error) {
	bytes := 1
	if opcode == 'X' {
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
var emptyTuple any = tuple{}

var errCutShort = errors.New("the pickle ends too early")

func (u *unpickler) take(n int) ([]byte, error) {
	if len(u.text) < n {
		return nil, errCutShort
	}
	b := u.text[:n]
	u.text = u.text[n:]
	return b, nil
}

// number takes a little-endian number.
func (u *unpickler) number(bytes int) (uint32, error) {
	b, err := u.take(bytes)
	if err != nil {
		return 0, err
	}
	return littleEndian(b), nil
}

func (u *unpickler) line() (string, error) {
	end := bytes.IndexByte(u.text, '\n')
	if end < 0 {
		return "", errCutShort
	}
	b, err := u.take(end + 1)
	return string(b[:end]), err
}

func (u *unpickler) push(x any) error {
	if len(u.stack) >= maxStack {
		return fmt.Errorf("more than %d objects are on the stack", maxStack)
	}
	u.stack = append(u.stack, x)
	return nil
}

// pushNew pushes an object that takes its own memory.
func (u *unpickler) pushNew(x any, bytes int) error {
	if err := u.charge(bytes); err != nil {
		return err
	}
	return u.push(x)
}

// charge takes bytes off the memory that objects may still take.
func (u *unpickler) charge(bytes int) error {
	if u.left -= int64(bytes); u.left < 0 {
		return fmt.Errorf("its objects take more than %d bytes for each of its own", bytesPerByte)
	}
	return nil
}

var errStack = errors.New("nothing is on the stack")

// pop takes the uppermost object. top leaves it on the stack.
func (u *unpickler) pop() (any, error) {
	x, err := u.top()
	if err == nil {
		u.stack = u.stack[:len(u.stack)-1]
	}
	return x, err
}

func (u *unpickler) top() (any, error) {
	if last := len(u.stack) - 1; last >= 0 && (len(u.marks) == 0 || last >= u.marks[len(u.marks)-1]) {
		return u.stack[last], nil
	}
	return nil, errStack
}

// popTo takes the objects above a place.
func (u *unpickler) popTo(place int) ([]any, error) {
	if place < 0 || place > len(u.stack) {
		return nil, errStack
	}
	taken := append([]any{}, u.stack[place:]...)
	u.stack = u.stack[:place]
	return taken, nil
}

// popMark takes the objects above the last mark.
func (u *unpickler) popMark() ([]any, error) {
	last := len(u.marks) - 1
	if last < 0 {
		return nil, errors.New("there is no mark")
	}
	place := u.marks[last]
	u.marks = u.marks[:last]
	return u.popTo(place)
}

// execute executes an opcode. The names are from pickletools.
func (u *unpickler) execute(opcode byte) error {
	switch opcode {
	case '\x80': // PROTO
		if version, err := u.number(1); err != nil || version < 2 || version > 5 {
			return fmt.Errorf("protocol %d, expected 2 to 5: %w", version, err)
		}
		return nil
	case '\x95': // FRAME, which only says how much to read at once
		_, err := u.take(operands[opcode])
		return err
	case '(': // MARK
		if len(u.marks) >= maxStack {
			return fmt.Errorf("more than %d marks are on the stack", maxStack)
		}
		u.marks = append(u.marks, len(u.stack))
		return nil
	case 'N': // NONE
		return u.push(nil)
	case '\x88', '\x89': // NEWTRUE, NEWFALSE
		return u.push(opcode == '\x88')
	case '}': // EMPTY_DICT
		return u.pushNew(&dict{}, bytesOfObject)
	case ']': // EMPTY_LIST
		return u.pushNew(&list{}, bytesOfObject)
	case ')': // EMPTY_TUPLE
		return u.push(emptyTuple)
	case 'K', 'M', 'J', '\x8a', 'G', 'X', '\x8c':
		// BININT1, BININT2, BININT, LONG1, BINFLOAT, BINUNICODE, SHORT_BINUNICODE
		return u.literal(opcode)
	case 't', '\x85', '\x86', '\x87': // TUPLE, TUPLE1, TUPLE2, TUPLE3
		return u.tuple(opcode)
	case 'a', 'e', 's', 'u': // APPEND, APPENDS, SETITEM, SETITEMS
		return u.extend(opcode)
	case 'q', 'r', 'h', 'j', '\x94': // BINPUT, LONG_BINPUT, BINGET, LONG_BINGET, MEMOIZE
		return u.remember(opcode)
	case 'c', '\x93': // GLOBAL, STACK_GLOBAL
		return u.class(opcode)
	case 'R', '\x81', 'Q', 'b': // REDUCE, NEWOBJ, BINPERSID, BUILD
		return u.construct(opcode)
	}
	return fmt.Errorf("opcode %q, expected those that torch.save writes", opcode)
}

// literal pushes a number or a text.
func (u *unpickler) literal(opcode byte) error {
	switch opcode {
	case 'G':
		b, err := u.take(operands[opcode])
		if err != nil {
			return err
		}
		return u.push(math.Float64frombits(binary.BigEndian.Uint64(b)))
	case 'X', '\x8a', '\x8c':
		b, err := u.counted(opcode)
		switch {
		case err != nil:
			return err
		case opcode == '\x8a':
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
	if opcode == 'J' {
		return u.push(int64(int32(n)))
	}
	return u.push(int64(n))
}

// long pushes an integer of up to 8 bytes, in two's complement.
func (u *unpickler) long(b []byte) error {
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

func (u *unpickler) tuple(opcode byte) error {
	var parts []any
	var err error
	if opcode == 't' {
		parts, err = u.popMark()
	} else {
		parts, err = u.popTo(len(u.stack) - int(opcode-'\x85') - 1)
	}
	if err != nil {
		return err
	}
	return u.pushNew(tuple(parts), bytesOfObject+bytesOfItem*len(parts))
}

// extend adds to a list or a dict.
func (u *unpickler) extend(opcode byte) error {
	var parts []any
	var err error
	switch opcode {
	case 'a':
		parts, err = u.popTo(len(u.stack) - 1)
	case 's':
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
	case *list:
		if opcode == 'a' || opcode == 'e' {
			to.items = append(to.items, parts...)
			return nil
		}
	case *dict:
		if (opcode == 's' || opcode == 'u') && len(parts)%2 == 0 {
			for i := 0; i < len(parts); i += 2 {
				to.entries = append(to.entries, entry{hashable(parts[i]), parts[i+1]})
			}
			return nil
		}
	}
	return fmt.Errorf("%d objects cannot be added to %s", len(parts), shown(to))
}

// hashable returns a key that can be compared, or nil: other keys are never looked up.
func hashable(key any) any {
	switch key.(type) {
	case string, int64, *object:
		return key
	}
	return nil
}

// remember numbers objects and fetches them again.
func (u *unpickler) remember(opcode byte) error {
	number := u.stored
	if opcode != '\x94' {
		var err error
		if number, err = u.number(operands[opcode]); err != nil {
			return err
		}
	}
	if opcode == 'q' || opcode == 'r' || opcode == '\x94' {
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
func (u *unpickler) class(opcode byte) error {
	if opcode == '\x93' {
		parts, err := u.popTo(len(u.stack) - 2)
		if err != nil {
			return err
		}
		module, isText := parts[0].(string)
		name, isName := parts[1].(string)
		if !isText || !isName {
			return errors.New("a class without a name")
		}
		return u.pushNew(class{module, name}, bytesOfObject)
	}
	module, err := u.line()
	if err != nil {
		return err
	}
	name, err := u.line()
	if err != nil {
		return err
	}
	return u.pushNew(class{module, name}, bytesOfObject+len(module)+len(name))
}

// construct makes tensors and their parts, and objects.
func (u *unpickler) construct(opcode byte) error {
	argument, err := u.pop()
	if err != nil {
		return err
	}
	switch opcode {
	case 'Q':
		return u.storage(argument)
	case 'b': // attributes, as a state_dict has
		x, err := u.top()
		if o, ok := x.(*object); ok {
			o.state = argument
		}
		return err
	}
	callable, err := u.pop()
	if err != nil {
		return err
	}
	arguments, _ := argument.(tuple)
	switch callable {
	case any(class{"torch._utils", "_rebuild_tensor_v2"}):
		return u.tensor(arguments)
	case any(class{"torch._utils", "_rebuild_parameter"}): // its first argument is the tensor
		if len(arguments) > 0 {
			return u.push(arguments[0])
		}
	case any(class{"torch._utils", "_rebuild_tensor_v3"}):
		return u.tensorOf(arguments)
	case any(class{"torch._tensor", "_rebuild_from_type_v2"}): // a function, a type, arguments, attributes
		if len(arguments) == 4 && arguments[0] == any(class{"torch._utils", "_rebuild_wrapper_subclass"}) {
			return u.subclass(arguments)
		}
		if len(arguments) > 2 && arguments[0] == any(class{"torch._utils", "_rebuild_tensor_v2"}) &&
			arguments[1] == any(class{"torch", "Tensor"}) {
			parts, _ := arguments[2].(tuple)
			return u.tensor(parts)
		}
	case any(class{"collections", "OrderedDict"}):
		return u.pushNew(&dict{}, bytesOfObject)
	case any(class{"torch", "Size"}):
		if len(arguments) > 0 {
			return u.push(arguments[0])
		}
	}
	if of, ok := callable.(class); ok && u.admitted != nil && u.admitted(of) {
		return u.pushNew(&object{class: of, arguments: arguments}, 3*bytesOfObject)
	}
	return fmt.Errorf("%s, expected nothing but tensors, numbers and texts in dicts and lists", shown(callable))
}

// storage pushes the object that torch.save writes in place of numbers.
func (u *unpickler) storage(id any) error {
	if parts, ok := id.(tuple); ok && len(parts) == 5 {
		kind, isKind := parts[1].(class)
		key, isKey := parts[2].(string)
		if isKind && isKey && (kind.module == "torch" || kind.module == "torch.storage") {
			return u.pushNew(storage{kind.name, key}, bytesOfObject)
		}
	}
	return errors.New("a persistent object that is no storage")
}

// subclass pushes a tensor that is made of others, as an object with these as attributes.
func (u *unpickler) subclass(arguments tuple) error {
	of, ok := arguments[1].(class)
	parts, _ := arguments[2].(tuple)
	if !ok || u.admitted == nil || !u.admitted(of) {
		return fmt.Errorf("%s, expected nothing but tensors, numbers and texts in dicts and lists", shown(arguments[1]))
	}
	return u.pushNew(&object{of, parts, arguments[3]}, 3*bytesOfObject)
}

// tensorOf pushes a tensor whose dtype is its seventh argument: its storage has none.
func (u *unpickler) tensorOf(arguments tuple) error {
	if len(arguments) >= 7 {
		s, isStorage := arguments[0].(storage)
		dtype, isType := arguments[6].(class)
		if isStorage && isType && dtype.module == "torch" {
			return u.tensor(append(tuple{storage{dtype.name, s.key}}, arguments[1:4]...))
		}
	}
	return errors.New("a tensor that is not made of a storage, an offset, a shape, strides and a dtype")
}

// tensor pushes a tensor from storage, offset, shape and strides.
func (u *unpickler) tensor(arguments tuple) error {
	if len(arguments) >= 4 {
		s, isStorage := arguments[0].(storage)
		offset, isOffset := arguments[1].(int64)
		shape, isShape := sizes(arguments[2])
		strides, isStrides := sizes(arguments[3])
		if isStorage && isOffset && isShape && isStrides && offset >= 0 && offset <= shard.MaxElements {
			return u.pushNew(torchTensor{s, offset, shape, strides}, 3*bytesOfObject+8*(len(shape)+len(strides)))
		}
	}
	return errors.New("a tensor that is not made of a storage, an offset, a shape and strides")
}

// maxDimensions is PyTorch's limit.
const maxDimensions = 64

func sizes(of any) ([]int64, bool) {
	t, ok := of.(tuple)
	if len(t) > maxDimensions {
		return nil, false
	}
	list := make([]int64, 0, len(t))
	for _, part := range t {
		n, isSize := part.(int64)
		if !isSize || n < 0 || n > shard.MaxElements {
			return nil, false
		}
		list = append(list, n)
	}
	return list, ok
}
