package strict

import (
	"fmt"
	"reflect"
)

// Fill sets the fields of a struct that have the tag key. Each gets the value at the path in its tag. A struct field
// gets the values of a section; a pointer to a struct is allocated if the document has the section. A struct with an
// empty path has keys of the same section.
func (r *Reader) Fill(into any) { r.fill(reflect.ValueOf(into).Elem()) }

func (r *Reader) fill(v reflect.Value) {
	for i := range v.NumField() {
		path, tagged := v.Type().Field(i).Tag.Lookup("key")
		if !tagged {
			continue
		}
		field := v.Field(i)
		switch p := field.Addr().Interface().(type) {
		case *bool:
			*p = r.Truth(path)
		case *int:
			*p = int(r.Integer(path))
		case *int64:
			*p = r.Integer(path)
		case *float64:
			*p = r.Number(path)
		case *[]string:
			*p = r.List(path)
		case *string:
			*p = r.Word(path)
		default:
			r.fillSection(path, field)
		}
	}
}

func (r *Reader) fillSection(path string, field reflect.Value) {
	section := r.Section(path)
	switch {
	case field.Kind() == reflect.Struct:
		section.fill(field)
	case field.Kind() == reflect.Pointer && field.Type().Elem().Kind() == reflect.Struct:
		made := reflect.New(field.Type().Elem())
		section.fill(made.Elem()) // also without the section, so that every path is looked up
		if section.value != nil {
			field.Set(made)
		}
	default:
		panic(fmt.Sprintf("strict: a field of type %v cannot be filled", field.Type()))
	}
}
